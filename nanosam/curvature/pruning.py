"""What a model loses when its smallest weights are set to zero, without retraining."""

import argparse
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nanosam.data.sources import eval_set
from nanosam.model.transformer import Params
from nanosam.optim.base import matching
from nanosam.optim.methods import MethodError
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded
from nanosam.system.errors import UsageError
from nanosam.system.progress import Progress

FILE = "prune.json"


def curve(run: Loaded, workdir: str, args: argparse.Namespace) -> dict[str, Any]:
  """Eval loss by sparsity, of one run."""
  c = run.config
  evaluator = Evaluator(run.model, eval_set(run.source, c), c.eval_batch_size, run.mesh)
  try:
    chosen = matching(run.params, args.params, "--params")
  except MethodError as e:
    raise UsageError(str(e)) from e
  progress, points, sparsities = Progress(0), [], sorted(set(args.sparsity))
  for i, sparsity in enumerate(sparsities, 1):
    pruned, share = prune(run.params, chosen, sparsity)
    evaluation = evaluator(pruned)
    losses = {"loss": evaluation.loss, "loss_sem": evaluation.loss_sem}
    points.append({"sparsity": sparsity, "zero": share, **losses})
    line = f"{workdir}  {i}/{len(sparsities)}  sparsity {sparsity:g}"
    progress.work(line, i, len(sparsities))
  progress.close()
  return {
    "workdir": str(workdir),
    "step": run.step,
    "weights": args.weights,
    "method": c.opt.method,
    "params": args.params,
    "points": points,
  }


def prune(params: Params, chosen: Params, sparsity: float) -> tuple[Params, float]:
  """Zeroes the smallest of the chosen weights; also returns which fraction of them is now zero."""
  leaves, tree = jax.tree.flatten(params)
  ours = [i for i, yes in enumerate(jax.tree.leaves(chosen)) if yes]
  total = sum(leaves[i].size for i in ours)
  limit = _smallest([leaves[i] for i in ours], round(sparsity * total))
  for i in ours:
    leaves[i] = _zeroed(leaves[i], limit)
  zero = sum(int(_count(leaves[i], 0)) for i in ours)
  return jax.tree.unflatten(tree, leaves), zero / total


def _smallest(arrays: Sequence[jax.Array], number: int) -> int:
  """A limit that so many magnitudes, as bits, do not exceed: by bisection, without sorting.

  Sorting would gather what is split over devices. Weights that tie with the last one go with it.
  """
  low, high = -1, 2**31 - 1  # positive floats are ordered as their bits are
  while number and high - low > 1:
    middle = (low + high) // 2
    enough = sum(int(_count(x, middle)) for x in arrays) >= number
    low, high = (low, middle) if enough else (middle, high)
  return high if number else -1


def _bits(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


@jax.jit
def _count(x: jax.Array, limit: int) -> jax.Array:
  return jnp.sum(_bits(x) <= limit)


@jax.jit
def _zeroed(x: jax.Array, limit: int) -> jax.Array:
  return jnp.where(_bits(x) <= limit, 0, x)


def table(runs: Sequence[dict[str, Any]]) -> str:
  """A column for each run, under its method, which is its name in the figure too."""
  counts = Counter(run["method"] for run in runs)
  names = [
    f"{run['method']} ({pathlib.Path(run['workdir']).name})"
    if counts[run["method"]] > 1
    else run["method"]
    for run in runs
  ]
  width = max(12, *(len(name) + 2 for name in names))
  lines = ["sparsity" + "".join(f"{name:>{width}}" for name in names)]
  for points in zip(*(run["points"] for run in runs), strict=True):
    losses = "".join(f"{p['loss']:>{width}.4f}" for p in points)
    lines.append(f"{points[0]['sparsity']:<8g}{losses}")
  return "\n".join(lines)
