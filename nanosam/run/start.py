"""The state that a run starts with: random, or from a checkpoint of another run.

The latter is fine-tuning on other data, training on with another schedule, or a late phase of SAM.
"""

import dataclasses
from typing import Any

import jax
import ml_collections
import optax
from etils import epath

from nanosam.config import flat
from nanosam.data.sources import Source, source_of
from nanosam.optim.base import AveragedWeights
from nanosam.run.checkpoint import digest
from nanosam.run.cluster import Hosts
from nanosam.run.restore import choose_step, open_checkpoints, stored_run
from nanosam.run.step import TrainState, TrainStep
from nanosam.system.errors import UsageError

_SAME_PARAMETERS = ("model.dtype", "model.remat", "model.attention")  # whatever these are


def start(
  c: ml_collections.ConfigDict, train_step: TrainStep, source: Source, hosts: Hosts
) -> tuple[TrainState, dict[str, Any] | None]:
  """The state before the first step, and where it comes from."""
  fresh, old = train_step.init(c.seed), check_origin(c, source)
  if old is None:
    return fresh, None
  place, _, step = c.init_from.partition("@")
  workdir = epath.Path(place)
  checkpoints = open_checkpoints(workdir, hosts)
  number = choose_step(checkpoints, workdir, step or "latest")
  before = TrainStep(old, source.outputs, train_step.mesh).abstract_state
  wanted = {"params": before.params}
  if c.init_optimizer:
    wanted["opt_state"] = before.opt_state
  found = checkpoints.restore_parts(wanted, number)
  checkpoints.close()
  opt_state = fresh.opt_state
  if c.init_optimizer:
    opt_state = _continued(place, found["opt_state"], fresh.opt_state)
  state = dataclasses.replace(fresh, params=found["params"], opt_state=opt_state)
  return state, {"workdir": place, "step": number, "parameters": digest(found["params"])}


def check_origin(c: ml_collections.ConfigDict, source: Source) -> ml_collections.ConfigDict | None:
  """The config of the run to start from, if any; refuses another model or vocabulary."""
  if not c.init_from:
    return None
  place = c.init_from.partition("@")[0]
  old, environment = stored_run(epath.Path(place))
  _check_model(place, old, c)
  if (environment.get("coding") or source_of(old.data).coding) != source.coding:
    raise UsageError(
      f"init_from={place} has another vocabulary than {c.data.source}: prepare that text again "
      f"with the tokenizer of {old.data.source}"
    )
  return old


def _check_model(
  place: str, old: ml_collections.ConfigDict, new: ml_collections.ConfigDict
) -> None:
  theirs, ours = (flat({"model": c.model}) for c in (old, new))
  if other := [k for k in ours if ours[k] != theirs[k] and k not in _SAME_PARAMETERS]:
    differences = ", ".join(f"{k} is {theirs[k]} there and {ours[k]} here" for k in other)
    raise UsageError(f"init_from={place} is another model: {differences}")


def _continued(place: str, old: optax.OptState, fresh: optax.OptState) -> optax.OptState:
  """The old moments; the learning rate's schedule and averages start anew."""

  def anew(state: Any) -> bool:
    return isinstance(state, optax.ScaleByScheduleState | AveragedWeights)

  kept = [state for state in old if not anew(state)]
  wanted = [state for state in fresh if not anew(state)]
  theirs, ours = (str(jax.tree.structure(states)) for states in (kept, wanted))
  if theirs != ours:
    raise UsageError(
      f"init_optimizer: {place} was trained with another optimizer; use its opt.base, clipping and "
      "weight decay, or init_optimizer=False"
    )
  moments = iter(kept)
  return tuple(state if anew(state) else next(moments) for state in fresh)
