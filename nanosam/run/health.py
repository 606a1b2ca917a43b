"""The health of a run, checked on the host: the guard may end it, spikes only cause a warning."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import Params
from nanosam.optim.guard import Counts
from nanosam.run.evaluation import row_sums
from nanosam.system.errors import UserError


def bad_rows(model: Classifier, params: Params, batch: Batch, mesh: Mesh) -> list[int]:
  """Rows of the batch whose plain loss is not finite."""
  with jax.set_mesh(mesh):
    found = jax.jit(lambda p, b: row_sums(model, p, b), out_shardings=sharding.replicated(mesh))(
      params, sharding.to_devices(batch, mesh)
    )
  return np.flatnonzero(~np.isfinite(sum(map(np.asarray, found.values())))).tolist()


def bad_step_error(
  step: int, metrics: Mapping[str, Any], rows: list[int], checkpoints: list[int], guard: Any
) -> UserError:
  """All that is known about a step that the guard ended the run at."""
  names = ("train/loss", "train/loss_perturbed", "opt/grad_norm")
  values = ", ".join(f"{n} {float(metrics[n]):.6g}" for n in names if n in metrics)
  counts = ", ".join(f"{n} {int(metrics[f'guard/{n}'])}" for n in Counts._fields)
  norms = ", ".join(
    f"{n.removeprefix('grad_norm/')} {float(v):.4g}"
    for n, v in metrics.items()
    if n.startswith("grad_norm/")
  )
  where = f"batch rows {rows}" if rows else "no single row of the batch"
  last = (
    f"the last good checkpoint is step {checkpoints[-1]}" if checkpoints else "no checkpoint yet"
  )
  if guard.policy == "abort" and metrics["guard/nonfinite"] > 0:
    tolerate = "guard.policy=skip"
  elif guard.perturbed == "abort" and metrics["guard/perturbed_nonfinite"] > 0:
    tolerate = "guard.perturbed=skip"
  else:
    tolerate = f"guard.max_skips={2 * guard.max_skips}"
  return UserError(
    f"step {step} is not finite: {values}; plain loss not finite in: {where}; gradient norms: "
    f"{norms}; counts: {counts}. Nothing was updated; {last}. Lower the learning rate or rho, warm "
    f"rho up, or set --config.{tolerate}; to resume in this workdir, set "
    "--config.allow_changed_keys=True as well"
  )


class PerturbationCheck:
  """Warns, once for each reason, of an eps that cannot do what it is for."""

  LARGE = 0.1  # of the length of the weights
  LOST = 0.5  # cosine with what is left of it in the compute type

  def __init__(self) -> None:
    self._said: set[str] = set()

  def update(self, metrics: Mapping[str, Any]) -> list[str]:
    if not metrics.get("opt/eps_norm"):
      return []
    ratio, cosine = float(metrics["opt/eps_ratio"]), metrics.get("opt/eps_cosine")
    found = {}
    if ratio > self.LARGE:
      found["large"] = (
        f"the perturbation is {ratio:.2g} times as long as the weights (opt/eps_ratio), too far "
        "for a gradient there to mean anything here: lower opt.rho"
      )
    if cosine is not None and cosine < self.LOST:
      found["lost"] = (
        f"bfloat16 rounds most of the perturbation away (opt/eps_cosine {cosine:.2f}): raise "
        "opt.rho, or set opt.perturbed_dtype=float32"
      )
    new = [message for reason, message in found.items() if reason not in self._said]
    self._said |= found.keys()
    return new


class SpikeDetector:
  """Notices when the loss jumps out of its recent range."""

  def __init__(self, deviations: float, memory: float = 0.98, warmup: int = 50):
    self._deviations, self._memory, self._warmup = deviations, memory, warmup
    self._seen = 0
    self._mean = self._variance = 0.0

  def update(self, loss: float) -> str | None:
    if not math.isfinite(loss):
      return None  # the guard's job
    spread = math.sqrt(self._variance)
    spike = (
      self._deviations > 0
      and self._seen >= self._warmup
      and loss > self._mean + self._deviations * max(spread, 1e-3)
    )
    message = f"loss {loss:.4f} after a mean of {self._mean:.4f} +- {spread:.4f}" if spike else None
    self._seen += 1
    rate = max(1 - self._memory, 1 / self._seen)
    delta = loss - self._mean
    self._mean += rate * delta
    self._variance = (1 - rate) * (self._variance + rate * delta**2)
    return message
