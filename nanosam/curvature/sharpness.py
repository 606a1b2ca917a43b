"""How sharp the minimum is that a run has found: its measures, each with its error."""

import argparse
import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from nanosam.curvature import ball, critical, density, pac_bayes, products
from nanosam.curvature.ball import moved
from nanosam.curvature.diagnostics import validation_rows
from nanosam.curvature.products import GAUSS_NEWTON, HESSIAN, Surface
from nanosam.curvature.spectrum import LARGEST, SMALLEST, Lanczos, Mean, converge, hutchinson, mean
from nanosam.data.batch import Batch, EvalSet, StreamOptions
from nanosam.model.transformer import Params
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded
from nanosam.run.step import TrainStep
from nanosam.system.errors import need
from nanosam.system.progress import Progress

FILE = "sharpness.json"
KEEP_BYTES = 2**29  # Lanczos keeps all its vectors where they fit in this
POINTS = 21  # of a line in the picture
# What things cost, in gradients; and how much of them is usual, until it is known.
TAUS, PROBE, H_PRODUCT, HG_PRODUCT, LOSS, CRITICAL = 12.0, 2.0, 2.7, 2.3, 0.33, 6.0
PROBES, ITERATIONS = 8, 60
CRITICAL_KEYS = {
  "critical_sharpness": "along the gradient",
  "critical_sharpness_update": "along the optimizer's update over its learning rate",
}


def measure(run: Loaded, args: argparse.Namespace) -> dict[str, Any]:
  """What the JSON holds."""
  start = time.monotonic()
  m = Measurement(run, args)
  found = {
    "step": run.step,
    "weights": args.weights,
    "method": run.config.opt.method,
    "sequences": m.sequences,
    "tokens": m.tokens,
    "batches": args.batches,
    "loss": m.loss,
    "gradient_norm": float(optax.tree.norm(m.gradient)),
  }
  for name, of in MEASURES.items():
    if name in args.measures:
      found.update(of(m))
  m.progress.close()
  return {**found, "seconds": round(time.monotonic() - start, 1)}


def with_earlier(found: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
  """Also what an earlier call measured of the same model on the same rows."""
  try:
    earlier = json.loads(file.read_text())
  except (OSError, ValueError):
    return found
  same = ("step", "weights", "method", "sequences", "tokens", "batches", "loss")
  return {**earlier, **found} if all(earlier.get(k) == found[k] for k in same) else found


class Measurement:
  """A model on some rows; each method measures something."""

  def __init__(self, run: Loaded, args: argparse.Namespace):
    c, size = run.config, args.batch_size or run.config.batch_size
    self._run, self._args = run, args
    self.progress, self._stage = Progress(0), ""
    self._needed = _work(args)
    self._done = dict.fromkeys(self._needed, 0.0)
    data = validation_rows(
      run.source, c, args.batches * size, fewer="lower --batches or --batch_size"
    )
    batches = [data.rows(slice(i, i + size)) for i in range(0, args.batches * size, size)]
    self.sequences, self.tokens = len(data.targets_BxL), int(data.weights_BxL.sum())
    self._model = products.exact_model(c, run.source.outputs)
    microbatches = -(-size * c.grad_accumulation_steps // c.batch_size)
    self._rows = -(-size // microbatches)  # of a forward pass
    self._surface = Surface(self._model, batches, run.mesh, microbatches)
    self._evaluator = Evaluator(self._model, EvalSet(data, 0, 0), self._rows, run.mesh)
    self._key = jax.random.key(args.seed)
    self._keys = jax.random.split(self._key, 3 + args.directions)  # traces, H, H_G, the picture
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
      self._keys[0],
      awaited,
      rtol=args.sem,
      most=args.probes,
      report=report,
    )
    return {**{f"trace_{k}": m._asdict() for k, m in means.items()}, "probes": probes}

  def eigenvalues(self) -> dict[str, Any]:
    """Both ends of H, the upper one of H_G, and the loss along the eigenvector of the largest."""
    ends = (LARGEST, SMALLEST)
    H = self._converged("eigenvalues of H", HESSIAN, self._keys[1], H_PRODUCT, ends)
    top, value = H.eigenvector(LARGEST), H.eigenvalue(LARGEST).value
    HG = self._converged("eigenvalue of H_G", GAUSS_NEWTON, self._keys[2], HG_PRODUCT, ends[:1])
    return {
      "lambda_max": H.eigenvalue(LARGEST)._asdict(),
      "lambda_min": H.eigenvalue(SMALLEST)._asdict(),
      "lambda_max_HG": HG.eigenvalue(LARGEST)._asdict(),
      "iterations": H.iterations,
      "iterations_HG": HG.iterations,
      "landscape": self._landscape(top, value),
    }

  def _lanczos(self, path: Any, key: jax.Array, most: int) -> Lanczos:
    params = self._run.params
    bytes_of_all = most * sum(x.nbytes for x in jax.tree.leaves(params))
    return Lanczos(
      lambda v: self._surface.product(path, params, v),
      lambda: self._surface.signs(params, key),
      keep=bytes_of_all <= KEEP_BYTES,
    )

  def _converged(
    self, stage: str, path: Any, key: jax.Array, cost: float, ends: Sequence[int]
  ) -> Lanczos:
    args = self._args

    def report(lanczos: Lanczos) -> None:
      found, n = [lanczos.eigenvalue(end) for end in ends], lanczos.iterations
      text = ", ".join(f"{e.value:.4g} +- {e.residual:.1g}" for e in found)
      worst = max(e.residual / max(abs(e.value), 1e-30) for e in found)
      needed = float(max(ITERATIONS, n))
      if worst < 0.5:  # from here on it falls about geometrically
        needed = n * max(math.log(args.residual) / math.log(worst), 1)
      self._show(stage, cost * n, cost * min(needed, args.iterations), text)

    lanczos = self._lanczos(path, key, args.iterations)
    converge(lanczos, ends, rtol=args.residual, most=args.iterations, report=report)
    return lanczos

  def rise(self) -> dict[str, Any]:
    """The rise of the loss by radius: along each direction, and the highest in the ball."""
    run, args = self._run, self._args
    directions = self._surface.directions(self.gradient, run.params, run.moments, run.config.opt)
    here = self._losses(self.gradient, [0.0])[0]
    rises = {name: np.subtract(self._losses(d, args.rho), here) for name, d in directions.items()}
    del directions
    rows = []
    for i, rho in enumerate(args.rho):
      row = {"rho": rho, **{name: float(rise[i]) for name, rise in rises.items()}}
      highest = ball.highest(
        self._surface.gradient, run.params, self.gradient, rho, args.ascent_steps
      )
      rows.append({**row, "ball": max(highest - self.loss, row[products.GRADIENT])})
      self._show("ascent", float(args.ascent_steps * (i + 1)))
    return {"sam_sharpness": rows}

  def critical(self) -> dict[str, Any]:
    """2 / eta_c along the gradient, and along the base optimizer's update."""
    run, g, surface = self._run, self.gradient, self._surface
    update = critical.update_direction(run.config.opt, run.params)
    found = {"critical_sharpness": critical.sharpness(surface, run.params, g, g)}
    with surface.exactly():
      d = update(g, run.opt_state, run.params)
    found["critical_sharpness_update"] = critical.sharpness(surface, run.params, g, d)
    self._show("critical", CRITICAL)
    return found

  def density(self) -> dict[str, Any]:
    args, key = self._args, jax.random.fold_in(self._key, 2**20)
    found = []
    for probe in range(args.density_probes):

      def report(lanczos: Lanczos, probe: int = probe) -> None:
        done = H_PRODUCT * (probe * args.density_steps + lanczos.iterations)
        self._show("density", done, text=f"probe {probe + 1} of {args.density_probes}")

      lanczos = self._lanczos(HESSIAN, jax.random.fold_in(key, probe), args.density_steps)
      found.append(density.quadrature(lanczos, args.density_steps, report))
    parameters = sum(x.size for x in jax.tree.leaves(self._run.params))
    return {
      "density": {
        "parameters": parameters,
        "trace": mean([parameters * density.moment(q, 1) for q in found])._asdict(),
        "nodes": [q.nodes for q in found],
        "weights": [q.weights for q in found],
        **density.density(found),
      }
    }

  def pac_bayes(self) -> dict[str, Any]:
    """On training data, as such a bound must be."""
    run, c, args = self._run, self._run.config, self._args
    units = run.source.independent_rows(c.model.L)
    few = f"--measures=pac_bayes: {units} training sequences are too few"
    need(units >= pac_bayes.FEWEST, f"{few}, {pac_bayes.FEWEST} are needed")
    sigmas = (0.0, *args.sigma)
    errors_KxG = pac_bayes.NoisyErrors(self._model, run.mesh)(
      run.params,
      self._training_rows,
      sigmas,
      args.draws,
      jax.random.fold_in(self._key, 2**20 + 1),
      lambda draw: self._show("noise", LOSS / args.batches * draw * len(sigmas)),
    )
    first = TrainStep(c, run.source.outputs, run.mesh).init(c.seed).params
    facts = {
      "units": units,
      "parameters": sum(x.size for x in jax.tree.leaves(run.params)),
      "distance": pac_bayes.distance(run.params, first),
      "delta": args.delta,
    }
    grid = pac_bayes.bounds(errors_KxG[:, 1:], args.sigma, **facts)
    best, guessing = min(grid, key=lambda b: (b.bound, b.KL)), 1 - 1 / run.source.outputs
    return {
      "pac_bayes": {
        **best._asdict(),
        "vacuous": best.bound >= guessing,
        "guessing": guessing,
        "train_error_without_noise": float(errors_KxG[:, 0].mean()),
        **facts,
        "draws": args.draws,
        "rows_by_draw": self._rows,
        "grid": [b._asdict() for b in grid],
        "assumptions": list(pac_bayes.ASSUMPTIONS),
      }
    }

  def _training_rows(self, draw: int) -> Batch:
    """Chosen independently of training, and anew for each draw: no run has such a data_seed."""
    c = self._run.config
    order = StreamOptions(
      L=c.model.L,
      batch_size=self._rows,
      rows=range(self._rows),
      data_seed=-1 - self._args.seed - 2**32 * draw,
      mask_documents=c.data.mask_documents,
      prefetch=1,
    )
    with contextlib.closing(self._run.source.train_stream(order)) as stream:
      return next(stream)

  def _landscape(self, top: Params, value: float) -> dict[str, Any]:
    """The loss along unit vectors, as far as the top one's parabola rises by half a nat."""
    reach = 1 / math.sqrt(value) if value > 0 else 1.0
    distances = np.linspace(-reach, reach, POINTS).tolist()
    length = math.sqrt(sum(x.size for x in jax.tree.leaves(top)))  # of a vector of signs
    random = [self._surface.signs(self._run.params, key) for key in self._keys[3:]]
    return {
      "distance": distances,
      "top": self._losses(top, distances),
      "top_slope": float(optax.tree.vdot(self.gradient, top)),
      "random": [self._losses(d, [x / length for x in distances]) for d in random],
    }

  def _losses(self, d: Params, distances: Sequence[float]) -> list[float]:
    found = []
    for distance in distances:
      with self._surface.exactly():
        evaluation = self._evaluator(moved(self._run.params, d, distance))
      found.append(evaluation.loss)
      self._evaluations += 1
      self._show("losses", LOSS * self._evaluations)
    return found


MEASURES: dict[str, Callable[[Measurement], dict[str, Any]]] = {
  "taus": Measurement.taus,
  "traces": Measurement.traces,
  "eigenvalues": Measurement.eigenvalues,
  "rise": Measurement.rise,
  "critical": Measurement.critical,
  "density": Measurement.density,
  "pac_bayes": Measurement.pac_bayes,
}
USUAL = ("taus", "traces", "eigenvalues", "rise", "critical")  # the others take as long again


def _work(args: argparse.Namespace) -> dict[str, float]:
  """What there is to do, in gradients, by stage."""
  rises, lines = LOSS * 2 * len(args.rho), LOSS * POINTS * (1 + args.directions)
  needed = {
    "taus": {"taus": TAUS},
    "traces": {"traces": PROBE * PROBES},
    "eigenvalues": {
      "eigenvalues of H": H_PRODUCT * ITERATIONS,
      "eigenvalue of H_G": HG_PRODUCT * ITERATIONS,
      "losses": lines,
    },
    "rise": {"losses": rises, "ascent": float(len(args.rho) * args.ascent_steps)},
    "critical": {"critical": CRITICAL},
    "density": {"density": H_PRODUCT * args.density_probes * args.density_steps},
    "pac_bayes": {"noise": LOSS / args.batches * args.draws * (1 + len(args.sigma))},
  }
  work: dict[str, float] = {}
  for name in args.measures:
    for stage, gradients in needed[name].items():
      work[stage] = work.get(stage, 0.0) + gradients
  return work


def table(found: dict[str, Any]) -> str:
  """The numbers with their errors, for people."""

  def line(name: str, value: dict[str, float], error: str) -> str:
    return f"{name:<28}{value['value']:>12.5g}  +- {value[error]:.2g} ({error})"

  errors = {
    "lambda_max(H)": ("lambda_max", "residual"),
    "lambda_min(H)": ("lambda_min", "residual"),
    "lambda_max(H_G)": ("lambda_max_HG", "residual"),
    **{f"tr({name})": (f"trace_{name.replace('_', '')}", "sem") for name in ("H", "H_G", "H_F")},
    **{
      (key := f"{prefix}_{path}"): (key, "sem")
      for prefix in products.PREFIXES.values()
      for path in products.Taus._fields
    },
  }
  lines = [
    f"step {found['step']} of {found['method']}, loss {found['loss']:.4f} on {found['sequences']} "
    f"sequences, {found['seconds']:.0f} s",
    *(line(name, found[key], error) for name, (key, error) in errors.items() if key in found),
  ]
  for row in found.get("sam_sharpness", ()):
    rises = "  ".join(f"{rise:>+12.4g} ({name})" for name, rise in row.items() if name != "rho")
    lines.append(f"{'loss rises, rho ' + format(row['rho'], 'g'):<28}{rises}")
  for key, along in CRITICAL_KEYS.items():
    if key in found:
      value = "none found" if found[key] is None else format(found[key], ".4g")
      lines.append(f"{'critical sharpness':<28}{value:>12}  ({along})")
  if "density" in found:
    lines.append(line("tr(H), by the density", found["density"]["trace"], "sem"))
  return "\n".join(lines + (_bound(found["pac_bayes"]) if "pac_bayes" in found else []))


def _bound(found: dict[str, Any]) -> list[str]:
  verdict = "vacuous" if found["vacuous"] else "better"
  return [
    f"{'PAC-Bayes bound on the error':<28}{found['bound']:>12.6g}  {verdict}: guessing has "
    f"{found['guessing']:.6g}",
    f"  at sigma {found['sigma']:g}: training error {found['train_error']:.4g} with noise "
    f"(at most {found['train_error_at_most']:.4g}), {found['train_error_without_noise']:.4g} "
    f"without; KL {found['KL']:.4g} nats, n {found['units']}, confidence {1 - found['delta']:g}",
    *(f"  assumes: {assumption}" for assumption in found["assumptions"]),
  ]
