"""TensorBoard event files, encoded by hand: TFRecords of five protobuf fields.

The official writers need TensorFlow, which this package keeps out. The format is small and frozen:
a file is a row of records, and a record holds one `Event` message.
"""

import os
import pathlib
import struct
import time
from collections.abc import Mapping

from nanosam.data.preparation.tfrecord import BYTES, FIXED32, FIXED64, VARINT, field, frame, varint

_SESSION_START = 1  # SessionLog.SessionStatus.START


def _event(step: int, body: bytes) -> bytes:
  wall_time = field(1, FIXED64, struct.pack("<d", time.time()))
  return wall_time + field(2, VARINT, varint(step)) + body


def _float32(x: float) -> bytes:
  try:
    return struct.pack("<f", x)
  except OverflowError:  # a finite double beyond float32
    return struct.pack("<f", float("inf") if x > 0 else float("-inf"))


def _scalars(values: Mapping[str, float | int | str]) -> bytes:
  out = b""
  for tag, x in values.items():
    if not isinstance(x, str):  # TensorBoard's scalar page has no place for text
      out += field(1, BYTES, field(1, BYTES, tag.encode()) + field(2, FIXED32, _float32(x)))
  return out


def _new_path(folder: pathlib.Path) -> pathlib.Path:
  """TensorBoard reads files in name order, so a restart's name must sort after all before it."""
  seconds = int(time.time())
  for old in folder.glob("events.out.tfevents.*"):
    stamp = old.name.split(".")[3]
    if stamp.isdigit():
      seconds = max(seconds, int(stamp) + 1)
  return folder / f"events.out.tfevents.{seconds:010d}.nanosam"


class TensorBoardWriter:
  """Scalars into a new event file in `folder`, one write to the file per record.

  Points of an earlier file with step >= first_step disappear from TensorBoard: a session that
  starts at `first_step` replaces them.
  """

  def __init__(self, folder: str | os.PathLike[str], *, first_step: int):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self._path = _new_path(folder)
    self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    self._append(0, field(3, BYTES, b"brain.Event:2"))
    start = field(1, VARINT, varint(_SESSION_START))
    self._append(first_step, field(7, BYTES, start))

  def _append(self, step: int, body: bytes) -> None:
    record = frame(_event(step, body))
    if os.write(self._fd, record) != len(record):
      raise OSError(f"{self._path} took only a part of a record: is the disk full?")

  def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
    summary = _scalars(values)
    if summary:
      self._append(step, field(5, BYTES, summary))

  def summary(self, values: Mapping[str, float]) -> None:
    """TensorBoard has no notion of one value for a whole run."""

  def close(self, exit_code: int = 0) -> None:
    os.close(self._fd)
