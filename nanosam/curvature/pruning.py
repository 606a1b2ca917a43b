"""What a model loses when its smallest weights are set to zero, without retraining."""

import argparse
import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanosam.curvature.changes import Setting, choose, points
from nanosam.data.sources import eval_set
from nanosam.model.transformer import Params
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded
from nanosam.system.errors import UsageError, need
from nanosam.system.progress import Progress

FILE = "prune.json"


def check(args: argparse.Namespace) -> None:
  for sparsity in args.sparsity:
    need(0 <= sparsity < 1, f"--sparsity={sparsity:g} must be in [0, 1)")
  try:
    re.compile(args.params)
  except re.error as e:
    raise UsageError(f"--params={args.params} is not a regex: {e}") from e


def curve(run: Loaded, workdir: str, args: argparse.Namespace) -> dict[str, Any]:
  """Eval loss by sparsity, of one run."""
  c = run.config
  data = eval_set(run.source, c)
  evaluator = Evaluator(run.model, data, c.eval_batch_size, run.mesh, keep=True)
  chosen = choose(run.params, args.params)
  chosen_settings = settings(chosen, sorted(set(args.sparsity)))
  progress, found = Progress(0), []
  for point in points(evaluator, run.params, chosen, chosen_settings, jax.random.key(0)):
    losses = {"loss": point.evaluation.loss, "loss_sem": point.evaluation.loss_sem}
    found.append({"sparsity": point.value, **point.facts, **losses})
    line = f"{workdir}  {len(found)}/{len(chosen_settings)}  sparsity {point.value:g}"
    progress.work(line, len(found), len(chosen_settings))
  progress.close()
  return {
    "workdir": str(workdir),
    "step": run.step,
    "weights": args.weights,
    "method": c.opt.method,
    "params": args.params,
    "points": found,
  }


def settings(chosen: Params, sparsities: Sequence[float]) -> list[Setting]:
  def pruning(sparsity: float) -> Setting:
    return Setting(sparsity, lambda params, key: prune(params, chosen, sparsity))

  return [pruning(sparsity) for sparsity in sparsities]


def prune(params: Params, chosen: Params, sparsity: float) -> Params:
  """Zeroes the smallest of the chosen weights, ranked over all of them together."""
  leaves, tree = jax.tree.flatten(params)
  ours = [i for i, yes in enumerate(jax.tree.leaves(chosen)) if yes]
  number = round(sparsity * sum(leaves[i].size for i in ours))
  if number:
    limit = _smallest([leaves[i] for i in ours], np.uint32(number))
    for i in ours:
      leaves[i] = _zeroed(leaves[i], limit)
  return jax.tree.unflatten(tree, leaves)


@jax.jit
def _smallest(arrays: Sequence[jax.Array], number: np.uint32) -> jax.Array:
  """The limit that so many magnitudes, as bits, do not exceed: by bisection, without sorting.

  Sorting would gather what is split over devices. Weights that tie with the last one go with it.
  """

  def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    middle = (low + high) // 2
    count = sum(jnp.sum(_bits(x) <= middle, dtype=jnp.uint32) for x in arrays)
    enough = count >= number
    return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

  every = jnp.uint32(0), jnp.uint32(2**31 - 1)  # positive floats are ordered as their bits are
  return jax.lax.fori_loop(0, 31, halve, every)[1]


def _bits(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)


@jax.jit
def _zeroed(x: jax.Array, limit: jax.Array) -> jax.Array:
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
  for row in zip(*(run["points"] for run in runs), strict=True):
    losses = "".join(f"{p['loss']:>{width}.4f}" for p in row)
    lines.append(f"{row[0]['sparsity']:<8g}{losses}")
  return "\n".join(lines)
