"""Curvature along the way: measured between two steps, on rows that training never sees."""

from typing import Any

from nanosam.curvature.products import PREFIXES, Surface, exact_model
from nanosam.data.batch import Batch
from nanosam.data.sources import Source
from nanosam.optim import base
from nanosam.run.step import TrainState, TrainStep
from nanosam.system.errors import UsageError


def validation_rows(source: Source, c: Any, rows: int, fewer: str) -> Batch:
  """The first `rows` rows of the validation split, all full; `fewer` says how to ask for less."""
  # A source gives whole documents, as many as fit: so ask for more rows, and cut.
  most = max(2 * rows, c.eval_steps * c.eval_batch_size)
  found = source.validation(L=c.model.L, rows=most, mask_documents=c.data.mask_documents).batch
  if len(found.targets_BxL) < rows:
    raise UsageError(
      f"{rows} {'images' if source.image_size else f'sequences of {c.model.L} tokens'} were asked "
      f"for, but {c.data.source} has {len(found.targets_BxL)} for validation: {fewer}"
    )
  return found.rows(slice(rows))


class Diagnostics:
  """Measures tau for a state; the training stream and the train step know nothing of it."""

  def __init__(self, train_step: TrainStep, source: Source):
    c = train_step.config
    model = exact_model(c, source.outputs)
    batch = validation_rows(
      source, c, c.diagnostics.batch_size, fewer="lower diagnostics.batch_size"
    )
    self._opt = c.opt
    self._surface = Surface(model, [batch], train_step.mesh, c.grad_accumulation_steps)

  def __call__(self, state: TrainState) -> dict[str, float]:
    (found,) = self._surface.taus(state.params, base.moments(state.opt_state), self._opt)
    return {
      f"{PREFIXES[along]}/{path}": float(tau)
      for along, taus in found.items()
      for path, tau in taus._asdict().items()
    }
