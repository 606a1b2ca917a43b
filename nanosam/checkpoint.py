"""Checkpoints: the state, where the data stands, and what the run has cost so far."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from nanosam.errors import UserError

FOLDER = "checkpoints"
EVAL_LOSS = "eval/loss"


class Restored(NamedTuple):
  step: int
  state: Any
  run: dict[str, Any]  # whatever JSON was saved beside the state


class Checkpoints:
  """Saves in the background; keeps the newest few and the best by eval loss."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    max_to_keep: int = 2,
    read_only: bool = False,
    say: Callable[[str], None] = print,
  ):
    self._folder = epath.Path(workdir).absolute() / FOLDER
    self._max_to_keep, self._read_only, self._say = max_to_keep, read_only, say
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    def loss(metrics):
      return metrics[EVAL_LOSS]

    keep = policy.AnyPreservationPolicy(
      [
        policy.LatestN(self._max_to_keep),
        policy.BestN(get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False),
      ]
    )
    return ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        best_fn=loss,
        best_mode="min",
        preservation_policy=keep,
        read_only=self._read_only,
        create=not self._read_only,
      ),
    )

  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def best_step(self) -> int | None:
    return self._manager.best_step() if self.steps() else None

  def save(self, step: int, state: Any, run: dict[str, Any], eval_loss: float | None) -> None:
    """Returns once the state is off the devices; `check` and `wait` report what went wrong."""
    metrics = None if eval_loss is None else {EVAL_LOSS: eval_loss}
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
    with _Trouble(self, step):
      self._manager.save(step, args=args, metrics=metrics, force=True)

  def check(self) -> None:
    with _Trouble(self, None):
      self._manager.check_for_errors()

  def wait(self) -> None:
    with _Trouble(self, None):
      self._manager.wait_until_finished()

  def restore(self, abstract_state: Any, step: int) -> Restored:
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract_state), run=ocp.args.JsonRestore()
    )
    restored = self._manager.restore(step, args=args)
    return Restored(step, restored["state"], restored["run"])

  def run_at(self, step: int) -> dict[str, Any]:
    """What was saved beside the state, without reading the state."""
    return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

  def restore_newest(self, abstract_state: Any) -> Restored | None:
    """The newest checkpoint that can be read; unreadable ones are set aside, not deleted."""
    unreadable = []
    for step in reversed(self.steps()):
      try:
        found = self.restore(abstract_state, step)
      except Exception as e:  # orbax and tensorstore raise whatever fits; all mean the same here
        unreadable.append(step)
        self._say(f"checkpoint {step} cannot be read ({_first_line(e)}); trying the one before")
        continue
      self._set_aside(unreadable)
      return found
    if unreadable:
      raise UserError(
        f"none of the checkpoints {unreadable} in {self._folder} can be read; "
        "move that folder away to start over"
      )
    return None

  def _set_aside(self, steps: list[int]) -> None:
    for step in steps:
      aside = self._folder.parent / "unreadable_checkpoints"
      aside.mkdir(exist_ok=True)
      (self._folder / str(step)).rename(aside / str(step))
      self._say(f"moved unreadable checkpoint {step} to {aside}")
    if steps:
      self._manager.close()
      self._manager = self._open()

  def close(self) -> None:
    self._manager.close()


class _Trouble:
  """Turns a failed save into one line that says what is still good."""

  def __init__(self, checkpoints: Checkpoints, step: int | None):
    self._checkpoints, self._step = checkpoints, step

  def __enter__(self) -> None:
    pass

  def __exit__(self, kind, error, traceback) -> None:
    if error is None or not isinstance(error, Exception):
      return
    folder = self._checkpoints._folder
    good = (
      sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []
    )
    last = f"last good checkpoint: step {good[-1]}" if good else "there is no good checkpoint yet"
    raise UserError(
      f"could not save a checkpoint in {folder}: {_first_line(error)}; {last}. "
      "Free some space or fix the folder, then run the same command to resume"
    ) from error


def _first_line(error: Exception) -> str:
  return str(error).strip().split("\n")[0][:300] or type(error).__name__
