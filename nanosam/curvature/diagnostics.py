"""Curvature along the way: measured between two steps, on rows that training never sees."""

from typing import Any

from nanosam.curvature import critical
from nanosam.curvature.products import PREFIXES, Surface, exact_model
from nanosam.data.batch import Batch
from nanosam.data.sources import Source
from nanosam.model.transformer import Params
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
  """Measures tau and the critical sharpness of a state.

  The training stream and the train step know nothing of it, and what it finds depends on the state
  alone.
  """

  def __init__(self, train_step: TrainStep, source: Source):
    c = train_step.config
    model = exact_model(c, source.outputs)
    batch = validation_rows(
      source, c, c.diagnostics.batch_size, fewer="lower diagnostics.batch_size"
    )
    self._opt = c.opt
    self._surface = Surface(model, [batch], train_step.mesh, c.grad_accumulation_steps)
    self._update = critical.update_direction(c.opt, train_step.abstract_params)

  def __call__(self, state: TrainState) -> dict[str, float]:
    surface, params = self._surface, state.params
    _, g = surface.gradient(params)
    directions = surface.directions(g, params, base.moments(state.opt_state), self._opt)
    taus = {
      f"{PREFIXES[along]}/{path}": float(tau)
      for along, taus in surface.taus_along(params, directions).items()
      for path, tau in taus._asdict().items()
    }
    del directions
    return {**taus, **self._critical(state, g)}

  def _critical(self, state: TrainState, g: Params) -> dict[str, float]:
    """Along the gradient, and along what the base optimizer makes of it; what there is of them."""
    surface, params = self._surface, state.params
    with surface.exactly():
      update = self._update(g, state.opt_state, params)
    found = {
      "sharpness/critical": critical.sharpness(surface, params, g, g),
      "sharpness/critical_update": critical.sharpness(surface, params, g, update),
    }
    return {name: value for name, value in found.items() if value is not None}
