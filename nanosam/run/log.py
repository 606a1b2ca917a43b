"""Where a run's numbers go: metrics.jsonl, TensorBoard, W&B, behind one interface.

metrics.jsonl is the record of truth: written in the caller's thread, and a failure to write it is
an error. The others are for watching: each lives in a thread of its own, and may fail or hang
without stopping or slowing the run.

The record of step s stands beside the state after s updates: its evaluation is of that state, its
loss, norms and rates are those that the s-th update was made with. A run that resumes from the
checkpoint of step R keeps the records with step <= R and writes the later ones anew.
"""

import contextlib
import json
import math
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from etils import epath

from nanosam.run.tensorboard_events import TensorBoardWriter
from nanosam.run.wandb_process import WandbProcess
from nanosam.system import errors
from nanosam.system.errors import UsageError, UserError, first_line
from nanosam.system.files import disk_errors, write_atomically

Value = float | int | str
Say = Callable[[str], None]
METRICS_FILE = "metrics.jsonl"
WANDB_MODES = ("auto", "online", "offline", "disabled")
# JSON has no such numbers. These spellings, as strings, keep each line readable by strict parsers.
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Writer(Protocol):
  """What the training loop sees."""

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    """Records the values after `step` updates."""

  def summary(self, values: Mapping[str, float]) -> None:
    """Sets values that describe the whole run; ignored where there is no place for them."""

  def close(self, exit_code: int = 0) -> None:
    """Finishes writing, for a run that ends with `exit_code`. Call it once."""


def open_writers(
  workdir: str | os.PathLike[str],
  *,
  config: dict[str, Any],
  run: Mapping[str, Any],
  wandb: str,
  tensorboard: bool,
  resume_step: int | None,
  close_timeout: float = 30.0,
  say: Say = errors.say,
) -> Writer:
  """Opens every writer of a run (on process 0 only).

  `run` may hold name, group, tags, project, entity (for W&B). `resume_step` is the step
  of the checkpoint the run goes on from; None starts from nothing, and drops older records.
  `say` shows one line to the user, from any thread.
  """
  if wandb not in WANDB_MODES:
    raise UsageError(f"unknown W&B mode {wandb!r}: choose one of {', '.join(WANDB_MODES)}")
  workdir = pathlib.Path(workdir)
  last_step = -1 if resume_step is None else resume_step
  writers: list[Writer] = [JsonlWriter(workdir / METRICS_FILE, last_step=last_step)]
  if tensorboard:
    writers.append(
      Background(
        lambda: TensorBoardWriter(workdir, first_step=last_step + 1),
        name="TensorBoard",
        close_timeout=close_timeout,
        say=say,
      )
    )
  if wandb != "disabled" and os.environ.get("WANDB_MODE") != "disabled":
    writers.append(
      Background(
        lambda: WandbProcess(
          workdir, mode=wandb, config=config, run=run, say=say, close_timeout=close_timeout
        ),
        name="W&B",
        close_timeout=close_timeout,
        say=say,
        abort=WandbProcess.kill,
      )
    )
  return FanOut(writers)


class FanOut:
  """Hands every record to all writers, as plain Python numbers."""

  def __init__(self, writers: list[Writer]):
    self._writers = writers

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    plain = _plain(values)
    for writer in self._writers:
      writer.write(int(step), plain)

  def summary(self, values: Mapping[str, float]) -> None:
    plain = _plain(values)
    for writer in self._writers:
      writer.summary(plain)

  def close(self, exit_code: int = 0) -> None:
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close, exit_code)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
  """A copy with NumPy and JAX scalars turned into Python numbers."""
  return {k: v.item() if hasattr(v, "item") else v for k, v in values.items()}


class JsonlWriter:
  """One JSON object per line, `step` first, in the file as soon as write() returns."""

  def __init__(self, path: str | os.PathLike[str], *, last_step: int):
    self._path = pathlib.Path(path)
    with disk_errors(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      truncate_after(self._path, last_step)
      self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    record = {"step": step} | {k: _encode(v) for k, v in values.items() if k != "step"}
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    with disk_errors(self._path):
      while line:  # one system call, unless the disk takes only a part of the line
        line = line[os.write(self._fd, line) :]

  def summary(self, values: Mapping[str, float]) -> None:
    """The file holds records only; best and last values can be read off them."""

  def close(self, exit_code: int = 0) -> None:
    with disk_errors(self._path):
      os.close(self._fd)


def _encode(value: Value) -> Value:
  if isinstance(value, float) and not math.isfinite(value):
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
  return value


def _decode(value: Any) -> Any:
  return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _parse(path: epath.Path | pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
  """(line, record) pairs, without a torn last line; damage elsewhere is the user's to look at."""
  lines = path.read_bytes().split(b"\n")
  pairs = []
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      record["step"] + 0
    except (ValueError, TypeError, KeyError) as e:
      if number == len(lines):  # empty, or cut off when the process died
        break
      raise UserError(f"{path} line {number} is not a metrics record: repair or remove it") from e
    pairs.append((line, record))
  return pairs


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The records of a metrics.jsonl; "NaN", "Infinity" and "-Infinity" come back as floats."""
  return [{k: _decode(v) for k, v in record.items()} for _, record in _parse(epath.Path(path))]


def truncate_after(path: str | os.PathLike[str], step: int) -> None:
  """Drops records past `step` and a torn last line; the file is whole at every moment."""
  path = pathlib.Path(path)
  if not path.is_file():
    return
  kept = b"".join(line + b"\n" for line, record in _parse(path) if record["step"] <= step)
  if kept != path.read_bytes():
    write_atomically(path, kept)


W = TypeVar("W", bound=Writer)


class Background(Generic[W]):
  """Runs a writer in a daemon thread; nothing it does reaches the caller.

  The thread makes the writer too, so a slow start costs the caller nothing. A full queue drops
  records and counts them; an exception switches the writer off with one line; close() gives up
  after `close_timeout` seconds and calls `abort` to end what still hangs.
  """

  def __init__(
    self,
    make_writer: Callable[[], W],
    *,
    name: str,
    close_timeout: float,
    say: Say,
    abort: Callable[[W], None] | None = None,
    capacity: int = 10_000,
  ):
    self._make_writer, self._abort = make_writer, abort
    self._name, self._close_timeout, self._say = name, close_timeout, say
    self._queue: queue.Queue[Callable[[W], None] | None] = queue.Queue(capacity)
    self._writer: W | None = None
    self._failed = False
    self._dropped = 0
    self._exit_code = 0
    self._thread = threading.Thread(target=self._work, name=f"writer-{name}", daemon=True)
    self._thread.start()

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    values = dict(values)  # the caller may change its own
    self._put(lambda writer: writer.write(step, values))

  def summary(self, values: Mapping[str, float]) -> None:
    values = dict(values)
    if self._queue.full():  # a record makes room: the summary is what people look at last
      with contextlib.suppress(queue.Empty):
        self._queue.get_nowait()
        self._count_drop()
    self._put(lambda writer: writer.summary(values))

  def _put(self, action: Callable[[W], None]) -> None:
    if self._failed:
      return
    try:
      self._queue.put_nowait(action)
    except queue.Full:
      self._count_drop()

  def _count_drop(self) -> None:
    self._dropped += 1
    if self._dropped == 1:
      self._say(
        f"{self._name} does not keep up: records for it are dropped until it does; "
        f"{METRICS_FILE} is complete"
      )

  def _work(self) -> None:
    try:
      self._writer = self._make_writer()
      while (action := self._queue.get()) is not None:
        action(self._writer)
      self._writer.close(self._exit_code)
    except BaseException as e:  # also a SystemExit: a logger must not end the run
      if self._failed:  # given up on by close(), which has said so
        return
      self._failed = True
      reason = first_line(e)
      self._say(f"{self._name} logging is off: {reason}; {METRICS_FILE} is complete")

  def close(self, exit_code: int = 0) -> None:
    self._exit_code = exit_code
    deadline = time.monotonic() + self._close_timeout
    with contextlib.suppress(queue.Full):
      if not self._failed:
        self._queue.put(None, timeout=self._close_timeout)
    self._thread.join(max(0.0, deadline - time.monotonic()))
    if self._thread.is_alive():
      self._failed = True
      self._dropped += self._queue.qsize()
      self._say(f"{self._name} did not finish within {self._close_timeout:g} s and was left behind")
      if self._abort and self._writer is not None:
        self._abort(self._writer)
    if self._dropped:
      self._say(f"{self._name}: {self._dropped} records were dropped; {METRICS_FILE} has them")
