"""Where a run's numbers go: metrics.jsonl, TensorBoard and W&B, behind one interface.

metrics.jsonl is written in the caller's thread, and a failure to write it is an error. The others
are for watching: each has a thread of its own, and may fail or hang without stopping or slowing the
run.
"""

import contextlib
import functools
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nanosam.run.metrics_file import METRICS_FILE, JsonlWriter, Value
from nanosam.run.wandb_process import WandbProcess
from nanosam.system import errors
from nanosam.system.errors import UsageError, first_line

Say = Callable[[str], None]
WANDB_MODES = ("auto", "online", "offline", "disabled")


class Writer(Protocol):
  """What the training loop sees."""

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    """Records the values after `step` updates."""

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    """Ends a run that exits with `exit_code`; `summary` describes all of it. Call it once."""


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
) -> "FanOut":
  """Opens every writer of a run (on process 0 only).

  `run` may hold name, group, tags, project, entity (for W&B). `resume_step` is the step
  of the checkpoint the run resumes from; None starts from scratch and drops older records.
  `say` shows one line to the user, from any thread.
  """
  if wandb not in WANDB_MODES:
    raise UsageError(f"unknown W&B mode {wandb!r}: choose one of {', '.join(WANDB_MODES)}")
  folder = pathlib.Path(workdir)
  last_step = -1 if resume_step is None else resume_step
  writers: list[Writer] = [JsonlWriter(folder / METRICS_FILE, last_step=last_step)]
  if tensorboard:
    events = functools.partial(TensorBoardWriter, folder, first_step=last_step + 1)
    writers.append(Background(events, "TensorBoard", close_timeout, say))
  if wandb != "disabled" and os.environ.get("WANDB_MODE") != "disabled":
    process = functools.partial(WandbProcess, folder, wandb, config, run, say, close_timeout)
    writers.append(Background(process, "W&B", close_timeout, say))
  return FanOut(writers)


class FanOut:
  """Hands every record to all writers, as plain Python numbers."""

  def __init__(self, writers: list[Writer]):
    self._writers = writers

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    plain = {k: v.item() if hasattr(v, "item") else v for k, v in values.items()}
    for writer in self._writers:
      writer.write(int(step), plain)

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close, exit_code, summary)


class TensorBoardWriter:
  """Writes scalars to a new event file, which holds each record as soon as write() returns.

  tensorboardX's SummaryWriter would queue them for a thread of its own, which leaves records behind
  when the process is killed and hangs when the disk is full. Its RecordWriter has no thread.
  """

  def __init__(self, folder: pathlib.Path, *, first_step: int):
    """TensorBoard hides the points of earlier files from `first_step` on."""
    import tensorboardX  # here, because it imports every cloud client that is installed
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    folder.mkdir(parents=True, exist_ok=True)
    self._file = tensorboardX.RecordWriter(os.fspath(_new_events_file(folder)))
    self._append(0, file_version="brain.Event:2")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._append(first_step, session_log=start)

  def _append(self, step: int, **content: Any) -> None:
    event = self._event(wall_time=time.time(), step=step, **content)
    self._file.write(event.SerializeToString())
    self._file.flush()

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    scalars = [
      self._summary.Value(tag=tag, simple_value=x)
      for tag, x in values.items()
      if not isinstance(x, str)  # TensorBoard's scalar page has no place for text
    ]
    if scalars:
      self._append(step, summary=self._summary(value=scalars))

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    self._file.close()


def _new_events_file(folder: pathlib.Path) -> pathlib.Path:
  """TensorBoard reads files in name order, so a restart's name must sort after all before it."""
  stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
  seconds = max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])
  return folder / f"events.out.tfevents.{seconds:010d}.nanosam"


class Background:
  """Runs a writer in a daemon thread; nothing it does reaches the caller.

  The thread makes the writer too, so a slow start costs the caller nothing. A full queue drops
  records and counts them; an exception switches the writer off with one line; close() gives up
  after `close_timeout` seconds and kills a process that still hangs.
  """

  def __init__(
    self,
    make_writer: Callable[[], Writer],
    name: str,
    close_timeout: float,
    say: Say,
    capacity: int = 10_000,
  ):
    self._make_writer, self._name = make_writer, name
    self._close_timeout, self._say = close_timeout, say
    self._queue: queue.Queue[tuple[int, dict[str, Value]] | None] = queue.Queue(capacity)
    self._end: tuple[int, Mapping[str, float] | None] = (0, None)
    self._writer: Writer | None = None
    self._failed = False
    self._dropped = 0
    self._thread = threading.Thread(target=self._work, name=f"writer-{name}", daemon=True)
    self._thread.start()

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    if self._failed:
      return
    try:
      self._queue.put_nowait((step, dict(values)))  # a copy: the caller may change its own
    except queue.Full:
      self._dropped += 1
      if self._dropped == 1:
        self._say(
          f"{self._name} does not keep up: records for it are dropped until it does; "
          f"{METRICS_FILE} is complete"
        )

  def _work(self) -> None:
    try:
      self._writer = self._make_writer()
      while (record := self._queue.get()) is not None:
        self._writer.write(*record)
      self._writer.close(*self._end)
    except BaseException as e:  # even a SystemExit: a logger must not end the run
      if self._failed:  # close() has given up on it and said so
        return
      self._failed = True
      self._say(f"{self._name} logging is off: {first_line(e)}; {METRICS_FILE} is complete")

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    self._end = exit_code, summary
    deadline = time.monotonic() + self._close_timeout
    with contextlib.suppress(queue.Full):
      if not self._failed:
        self._queue.put(None, timeout=self._close_timeout)
    self._thread.join(max(0.0, deadline - time.monotonic()))
    if self._thread.is_alive():
      self._failed = True
      self._dropped += self._queue.qsize()
      self._say(f"{self._name} did not finish within {self._close_timeout:g} s and was abandoned")
      if isinstance(self._writer, WandbProcess):
        self._writer.kill()
    if self._dropped:
      self._say(f"{self._name}: {self._dropped} records were dropped; {METRICS_FILE} has them")
