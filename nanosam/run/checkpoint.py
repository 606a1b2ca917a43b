"""Checkpoints: the state, the position in the data, and what the run has cost so far."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from nanosam.run.cluster import ALONE, Hosts
from nanosam.system.errors import UserError
from nanosam.system.remote import is_remote

FOLDER = "checkpoints"
ASIDE = "unreadable_checkpoints"
EVAL_LOSS = "eval/loss"
_BLOCK_BYTES = 1 << 24  # of an array on the host whose checksum is computed at a time
_OTHER_SHAPES = "compatible with the stored shape|tree structures do not match"  # orbax's words
_DETAILS = r" \[tensorstore_spec| \[source locations| See full TensorStore details|\. Truncating"


class Damaged(Exception):
  """What was read is not what was saved."""


class Restored(NamedTuple):
  step: int
  state: Any
  run: dict[str, Any]  # whatever JSON was saved beside the state


def found_steps(workdir: epath.Path) -> list[int]:
  """Steps of the complete checkpoints on disk, without opening any."""
  folder = workdir / FOLDER
  if not folder.is_dir():
    return []
  steps = (path for path in folder.iterdir() if path.name.isdigit())
  return sorted(int(path.name) for path in steps if ocp.utils.is_checkpoint_finalized(path))


class Checkpoints:
  """Saves in the background; keeps the newest few and the best by eval loss."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    max_to_keep: int = 2,
    read_only: bool = False,
    say: Callable[[str], None] = print,
    hosts: Hosts = ALONE,
  ):
    self._hosts = hosts
    path = os.fspath(workdir)
    self._folder = epath.Path(path if is_remote(path) else os.path.abspath(path)) / FOLDER
    self._max_to_keep, self._read_only, self._say = max_to_keep, read_only, say
    self._failure: BaseException | None = None  # of a save in the background
    _mute_stragglers()
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    keep = policy.AnyPreservationPolicy(
      [
        policy.LatestN(self._max_to_keep),
        policy.BestN(
          get_metric_fn=_eval_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
        ),
      ]
    )
    options = ocp.CheckpointManagerOptions(
      best_fn=_eval_loss,
      best_mode="min",
      preservation_policy=keep,
      read_only=self._read_only,
      create=not self._read_only,
      cleanup_tmp_directories=not self._read_only,  # left by a run that died while saving
      async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier),
    )
    try:
      if self._folder.exists() and not self._folder.is_dir():
        raise NotADirectoryError(f"{self._folder} is not a folder")
      return ocp.CheckpointManager(self._folder, options=options)
    except OSError as e:
      raise UserError(
        f"cannot use the checkpoint folder {self._folder}: {e.strerror or e}; fix or move it"
      ) from e
    except ValueError as e:  # orbax reads all eval losses at once, and one is unreadable
      found = found_steps(self._folder.parent)
      broken = [step for step in found if not _has_readable_metrics(self._folder / str(step))]
      if not broken or self._read_only:
        raise UserError(f"cannot read the checkpoints {broken} in {self._folder}: {e}") from e
      self._move_aside(broken)
      return self._open()

  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def save(
    self,
    step: int,
    state: Any,
    run: dict[str, Any],
    eval_loss: float | None,
    after: concurrent.futures.Future[None] | None = None,
  ) -> None:
    """Returns once the state is copied from the devices; `check` and `wait` report failures.

    The checkpoint does not count as complete until `after` is done.
    """
    metrics = None if eval_loss is None else {EVAL_LOSS: eval_loss}
    sums = checksums(state)
    sealed = {"run": run, "arrays": sums, "sha256": _digest([run, sums])}
    items = {"state": ocp.args.PyTreeSave(state), "run": ocp.args.JsonSave(sealed)}
    if after is not None:
      items["after"] = After(after)
    with self._save_errors():
      self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

  def check(self) -> None:
    """Raises if a save has failed in the background."""
    with self._save_errors():
      if self._failure:
        raise self._failure

  def _barrier(self, *, key: str, timeout_ms: int) -> None:
    """Where orbax, in the background, makes processes wait for each other.

    It does so even after an error, when the others wait at another barrier, for ten minutes.
    """
    self._failure = sys.exc_info()[1]
    if self._failure:
      raise self._failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

  def wait(self) -> None:
    with self._save_errors():
      self._manager.wait_until_finished()

  def restore(
    self, target: Any, step: int, partial: bool = False, on_host: bool = False
  ) -> Restored:
    """Arrays with the shapes, types and shardings of `target`, however they were saved.

    With `on_host`, they are numpy arrays, and no device is needed.
    """
    to_devices = ocp.checkpoint_utils.construct_restore_args(target)
    to_host = jax.tree.map(lambda x: ocp.RestoreArgs(np.ndarray, dtype=x.dtype), target)
    arrays = ocp.args.PyTreeRestore(
      item=target, restore_args=to_host if on_host else to_devices, partial_restore=partial
    )
    restored = self._read(step, ocp.args.Composite(state=arrays, run=ocp.args.JsonRestore()))
    run, wanted = _unseal(restored["run"])
    _check(restored["state"], target, wanted)
    return Restored(step, restored["state"], run)

  def restore_parts(
    self, target: dict[str, Any], step: int, on_host: bool = False
  ) -> dict[str, Any]:
    """Some fields of the state, or arrays of them, without reading the others."""
    try:
      return self.restore(target, step, partial=True, on_host=on_host).state
    except Exception as e:
      others = ", ".join(str(s) for s in self.steps() if s != step)
      raise UserError(
        f"checkpoint {step} in {self._folder} cannot be read ({_reason(e)}); "
        + (f"there are also {others}" if others else "there is no other")
      ) from e

  def read_run(self, step: int) -> dict[str, Any]:
    """What was saved beside the state, without reading any array."""
    found = self._read(step, ocp.args.Composite(run=ocp.args.JsonRestore()))
    return _unseal(found["run"])[0]

  def _read(self, step: int, args: ocp.args.Composite) -> Any:
    """Every process reads on its own: one that fails must not leave the others waiting for it."""
    found, reason, me = None, "", jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
      primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.CompositeCheckpointHandler(
      composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    try:
      with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        found = reader.restore(self._folder / str(step), args)
    except Exception as e:  # orbax and tensorstore raise many kinds; all mean the same here
      reason = _reason(e)
    if reasons := list(filter(None, self._hosts.gather(reason))):
      raise Damaged(reasons[0])
    return found

  def restore_newest(self, abstract_state: Any) -> Restored | None:
    """The newest readable checkpoint; unreadable ones are moved aside, not deleted."""
    unreadable: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        found = self.restore(abstract_state, step)
      except Damaged as e:
        unreadable[step] = _reason(e)
        self._say(f"checkpoint {step} cannot be read ({unreadable[step]}); trying the one before")
        continue
      if unreadable:
        self._manager.close()
        self._move_aside(list(unreadable))
        self._manager = self._open()
      return found
    if unreadable:
      newest, reason = next(iter(unreadable.items()))
      if all(re.search(_OTHER_SHAPES, reason) for reason in unreadable.values()):
        raise UserError(
          f"the checkpoints {sorted(unreadable)} in {self._folder} belong to another model or "
          f"optimizer ({reason}): restore the settings of that run, or use another workdir"
        )
      raise UserError(
        f"none of the checkpoints {sorted(unreadable)} in {self._folder} can be read "
        f"({newest}: {reason}); move that folder away to start over"
      )
    return None

  def _move_aside(self, steps: list[int]) -> None:
    aside = self._folder.parent / ASIDE
    for step in steps if self._hosts.first else ():
      aside.mkdir(exist_ok=True)
      names = itertools.chain([str(step)], (f"{step}.{n}" for n in itertools.count(1)))
      target = next(aside / name for name in names if not (aside / name).exists())
      (self._folder / str(step)).rename(target)
      self._say(f"moved unreadable checkpoint {step} to {target}")
    self._hosts.gather(None)  # the others wait until it is done

  def close(self) -> None:
    with self._save_errors():
      self._manager.close()

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    """Turns a failed save into one line that names the last good checkpoint."""
    try:
      yield
    except Exception as e:
      good = found_steps(self._folder.parent)
      last = f"the last good one is step {good[-1]}" if good else "there is no good one yet"
      raise UserError(
        f"could not save a checkpoint in {self._folder}: {_reason(e)}; {last}. "
        "Free some space or fix the folder, then run the same command to resume"
      ) from e


class _Nothing(ocp.AsyncCheckpointHandler):
  """Saves nothing: it makes orbax wait for a future before a checkpoint is complete."""

  async def async_save(self, directory: Any, args: "After") -> list[ocp.future.Future]:
    return [args.done]

  def save(self, directory: Any, args: "After") -> None:
    args.done.result()

  def restore(self, directory: Any, args: Any = None) -> None:
    pass


@ocp.args.register_with_handler(_Nothing, for_save=True, for_restore=True)
@dataclasses.dataclass
class After(ocp.args.CheckpointArgs):
  done: Any  # a Future


def _eval_loss(metrics: dict[str, float]) -> float:
  loss = metrics.get(EVAL_LOSS, math.inf)
  return math.inf if math.isnan(loss) else loss


def _has_readable_metrics(checkpoint: epath.Path) -> bool:
  file = checkpoint / "metrics" / "metrics"
  try:
    return not file.exists() or isinstance(json.loads(file.read_text()), dict)
  except ValueError:
    return False


# Tensorstore reads a damaged chunk without complaint. So every array has a checksum of its bits,
# computed where the array is, and the same for any sharding.


def checksums(tree: Any) -> dict[str, int]:
  """One number for each array, under its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
  arrays = [x for _, x in leaves]
  if all(isinstance(x, np.ndarray) for x in arrays):
    return dict(zip(names, map(_sum_of_blocks, arrays), strict=True))
  return dict(zip(names, map(int, jax.device_get(_sums(arrays))), strict=True))


def digest(tree: Any) -> str:
  """One short hash of all arrays."""
  return _digest(checksums(tree))[:16]


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
  """One program: on CPUs the collectives of many small ones, all under way, wait for each other."""
  return [_weighted_sum_of_bits(x) for x in arrays]


def _sum_of_blocks(x: np.ndarray) -> int:
  """The same number from one block of rows at a time: XLA needs a copy of what it adds up.

  Each block is copied, since JAX may hold on to an argument, and so to all of `x`, for a while.
  """
  x = np.atleast_1d(x)
  rows = max(1, _BLOCK_BYTES * len(x) // max(1, x.nbytes))
  starts = range(0, len(x), rows)
  return sum(int(_sum_of_rows(x[i : i + rows].copy(), i)) for i in starts) % 2**32


def _weighted_sum_of_bits(x: jax.Array, first: int | jax.Array = 0) -> jax.Array:
  """Modulo 2^32, with odd weights: it changes with any one element, and with their order.

  `x` may be a part of the array, with its rows from `first` on.
  """
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == bool:
    x = x.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  weights = jnp.ones(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    place += jnp.uint32(first) if axis == 0 else 0
    weights += 2 * place * jnp.uint32(0x9E3779B1 + 2 * axis)
  return jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)


_sum_of_rows = jax.jit(_weighted_sum_of_bits)


def _check(tree: Any, target: Any, wanted: dict[str, int]) -> None:
  """Refuses damaged arrays, and those of another shape or type than expected."""
  for name, found, expected in zip(
    sums := checksums(tree), jax.tree.leaves(tree), jax.tree.leaves(target), strict=True
  ):
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
      raise Damaged(
        f"{name} is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
      )
    if wanted.get(name) != sums[name]:
      raise Damaged(f"{name} does not match its checksum")


def _unseal(sealed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
  try:
    run, arrays = sealed["run"], sealed["arrays"]
    if sealed["sha256"] == _digest([run, arrays]):
      return run, arrays
  except (KeyError, TypeError):
    pass
  raise Damaged("the record of the run does not match its checksum")


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
  """One line; orbax and tensorstore append pages of details."""
  line = str(error.__cause__ or error).strip().split("\n")[0]
  return re.split(_DETAILS, line)[0][:300] or type(error).__name__


@functools.cache
def _mute_stragglers() -> None:
  """Lets a failure be reported once.

  When one array cannot be read or written, orbax stops waiting for the others, and each of them
  logs an error of its own at any later time.
  """
  previous = sys.unraisablehook

  def without_stragglers(unraisable: Any) -> None:
    closed_loop = str(unraisable.exc_value) == "Event loop is closed"
    if not closed_loop and not inspect.iscoroutine(unraisable.object):
      previous(unraisable)

  sys.unraisablehook = without_stragglers
  logging.getLogger("asyncio").disabled = True
  warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
