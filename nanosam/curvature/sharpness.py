"""How sharp the minimum is that a run has found: eigenvalues, traces, taus, losses around it."""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from nanosam.curvature import products
from nanosam.curvature.diagnostics import validation_rows
from nanosam.curvature.products import GAUSS_NEWTON, HESSIAN, Surface
from nanosam.curvature.spectrum import LARGEST, SMALLEST, Lanczos, Mean, converge, hutchinson, mean
from nanosam.data.batch import EvalSet
from nanosam.model.transformer import Params
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded
from nanosam.system.progress import Progress

FILE = "sharpness.json"
KEEP_BYTES = 2**29  # Lanczos keeps all its vectors where they fit in this
POINTS = 21  # of a line in the picture
# What things cost, in gradients; and how much of them is usual, until it is known.
TAUS, PROBE, H_PRODUCT, HG_PRODUCT, LOSS = 12.0, 2.0, 2.7, 2.3, 0.33
PROBES, ITERATIONS = 8, 60


def measure(run: Loaded, args: argparse.Namespace) -> dict[str, Any]:
  """What the JSON holds."""
  start, c = time.monotonic(), run.config
  m = Measurement(run, args)
  found = {
    "step": run.step,
    "weights": args.weights,
    "method": c.opt.method,
    "sequences": m.sequences,
    "tokens": m.tokens,
    "batches": args.batches,
    "loss": m.loss,
    "gradient_norm": float(optax.tree.norm(m.gradient)),
    **m.taus(),
    **m.traces(),
    **m.eigenvalues(),
    "sam_sharpness": m.sam_sharpness(),
    "landscape": m.landscape(),
  }
  m.progress.close()
  return {**found, "seconds": round(time.monotonic() - start, 1)}


class Measurement:
  """A model on some rows; each method measures something."""

  def __init__(self, run: Loaded, args: argparse.Namespace):
    c, size = run.config, args.batch_size or run.config.batch_size
    self._run, self._args = run, args
    self.progress, self._stage = Progress(0), ""
    self._needed = {
      "taus": TAUS,
      "traces": PROBE * PROBES,
      "eigenvalues of H": H_PRODUCT * ITERATIONS,
      "eigenvalue of H_G": HG_PRODUCT * ITERATIONS,
      "losses": LOSS * (2 * len(args.rho) + POINTS * (1 + args.directions)),
    }
    self._done = dict.fromkeys(self._needed, 0.0)
    data = validation_rows(
      run.source, c, args.batches * size, fewer="lower --batches or --batch_size"
    )
    batches = [data.rows(slice(i, i + size)) for i in range(0, args.batches * size, size)]
    self.sequences, self.tokens = len(data.targets_BxL), int(data.weights_BxL.sum())
    net = products.exact_model(c, run.source.outputs)
    microbatches = -(-size * c.grad_accumulation_steps // c.batch_size)
    self._surface = Surface(net, batches, run.mesh, microbatches)
    self._evaluator = Evaluator(net, EvalSet(data, 0, 0), -(-size // microbatches), run.mesh)
    self._keys = iter(jax.random.split(jax.random.key(args.seed), 3 + args.directions))
    self._evaluations = 0
    self.loss, self.gradient = self._surface.gradient(run.params)

  def _show(self, stage: str, done: float, needed: float | None = None, text: str = "") -> None:
    """What is being measured and the time left; work is counted in gradients."""
    self._done[stage] = done
    self._needed[stage] = max(done, self._needed[stage] if needed is None else needed)
    counts = stage == self._stage  # the first time of a stage is mostly compiling
    work = sum(self._done.values()), sum(self._needed.values())
    self.progress.work(f"{stage}  {text}", *work, counts=counts)
    self._stage = stage

  def taus(self) -> dict[str, dict[str, float]]:
    run = self._run
    by_batch = self._surface.taus(run.params, run.moments, run.config.opt)
    self._show("taus", TAUS)
    return {
      f"{prefix}_{path}": mean([float(getattr(t[name], path)) for t in by_batch])._asdict()
      for name, prefix in products.PREFIXES.items()
      if name in by_batch[0]
      for path in products.Taus._fields
    }

  def traces(self) -> dict[str, Any]:
    args, awaited = self._args, ("H", "HG")  # that of H_F may well be zero

    def report(probes: int, means: dict[str, Mean]) -> None:
      ratio = max(means[k].sem / abs(means[k].value) for k in awaited) / args.sem
      needed = min(args.probes, max(PROBES, probes * ratio**2)) if probes > 2 else PROBES
      text = f"tr(H) {means['H'].value:.5g} +- {means['H'].sem:.2g}"
      self._show("traces", PROBE * probes, PROBE * needed, text)

    means, probes = hutchinson(
      lambda key: self._surface.probe(self._run.params, key),
      next(self._keys),
      awaited,
      rtol=args.sem,
      most=args.probes,
      report=report,
    )
    return {**{f"trace_{k}": m._asdict() for k, m in means.items()}, "probes": probes}

  def eigenvalues(self) -> dict[str, Any]:
    """Both ends of H, the upper one of H_G; the eigenvector stays for the picture."""
    H = self._lanczos("eigenvalues of H", HESSIAN, H_PRODUCT, (LARGEST, SMALLEST))
    self._top, self._top_value = H.eigenvector(LARGEST), H.eigenvalue(LARGEST).value
    HG = self._lanczos("eigenvalue of H_G", GAUSS_NEWTON, HG_PRODUCT, (LARGEST,))
    return {
      "lambda_max": H.eigenvalue(LARGEST)._asdict(),
      "lambda_min": H.eigenvalue(SMALLEST)._asdict(),
      "lambda_max_HG": HG.eigenvalue(LARGEST)._asdict(),
      "iterations": H.iterations,
      "iterations_HG": HG.iterations,
    }

  def _lanczos(self, stage: str, path: Any, cost: float, ends: Sequence[int]) -> Lanczos:
    args, params, key = self._args, self._run.params, next(self._keys)

    def report(lanczos: Lanczos) -> None:
      found, n = [lanczos.eigenvalue(end) for end in ends], lanczos.iterations
      text = ", ".join(f"{e.value:.4g} +- {e.residual:.1g}" for e in found)
      worst = max(e.residual / max(abs(e.value), 1e-30) for e in found)
      needed = float(max(ITERATIONS, n))
      if worst < 0.5:  # from here on it falls about geometrically
        needed = n * max(math.log(args.residual) / math.log(worst), 1)
      self._show(stage, cost * n, cost * min(needed, args.iterations), text)

    bytes_of_all = args.iterations * sum(x.nbytes for x in jax.tree.leaves(params))
    lanczos = Lanczos(
      lambda v: self._surface.product(path, params, v),
      lambda: self._surface.signs(params, key),
      keep=bytes_of_all <= KEEP_BYTES,
    )
    converge(lanczos, ends, rtol=args.residual, most=args.iterations, report=report)
    return lanczos

  def sam_sharpness(self) -> list[dict[str, float]]:
    """The rise of the loss along each direction, by radius."""
    run = self._run
    directions = self._surface.directions(self.gradient, run.params, run.moments, run.config.opt)
    here = self._losses(self.gradient, [0.0])[0]
    rises = {
      name: np.subtract(self._losses(d, self._args.rho), here) for name, d in directions.items()
    }
    return [
      {"rho": rho, **{name: float(rise[i]) for name, rise in rises.items()}}
      for i, rho in enumerate(self._args.rho)
    ]

  def landscape(self) -> dict[str, Any]:
    """The loss along unit vectors, as far as the top one's parabola rises by half a nat."""
    value = self._top_value
    reach = 1 / math.sqrt(value) if value > 0 else 1.0
    distances = np.linspace(-reach, reach, POINTS).tolist()
    length = math.sqrt(sum(x.size for x in jax.tree.leaves(self._top)))  # of a vector of signs
    random = [self._surface.signs(self._run.params, key) for key in self._keys]
    return {
      "distance": distances,
      "top": self._losses(self._top, distances),
      "top_slope": float(optax.tree.vdot(self.gradient, self._top)),
      "random": [self._losses(d, [x / length for x in distances]) for d in random],
    }

  def _losses(self, d: Params, distances: Sequence[float]) -> list[float]:
    found = []
    for distance in distances:
      with self._surface.exactly():
        evaluation = self._evaluator(_moved(self._run.params, d, distance))
      found.append(evaluation.loss)
      self._evaluations += 1
      self._show("losses", LOSS * self._evaluations)
    return found


@jax.jit
def _moved(params: Params, d: Params, distance: float) -> Params:
  return jax.tree.map(lambda p, d: p + distance * d, params, d)


def table(found: dict[str, Any]) -> str:
  """The numbers with their errors, for people."""

  def line(name: str, key: str, error: str) -> str:
    value = found[key]
    return f"{name:<28}{value['value']:>12.5g}  +- {value[error]:.2g} ({error})"

  lines = [
    f"step {found['step']} of {found['method']}, loss {found['loss']:.4f} on {found['sequences']} "
    f"sequences, {found['seconds']:.0f} s",
    line("lambda_max(H)", "lambda_max", "residual"),
    line("lambda_min(H)", "lambda_min", "residual"),
    line("lambda_max(H_G)", "lambda_max_HG", "residual"),
    *(line(f"tr({name})", f"trace_{name.replace('_', '')}", "sem") for name in ("H", "H_G", "H_F")),
  ]
  for prefix in products.PREFIXES.values():
    for path in products.Taus._fields:
      if (key := f"{prefix}_{path}") in found:
        lines.append(line(key, key, "sem"))
  for row in found["sam_sharpness"]:
    rises = "  ".join(f"{rise:>+12.4g} ({name})" for name, rise in row.items() if name != "rho")
    lines.append(f"{'loss rises, rho ' + format(row['rho'], 'g'):<28}{rises}")
  return "\n".join(lines)
