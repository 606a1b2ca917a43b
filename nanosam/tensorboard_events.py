"""TensorBoard event files, encoded by hand: five protobuf fields and a record frame.

The official writers need TensorFlow, which this package keeps out. The format is small and frozen:
a file is a row of records, a record is (length, crc of length, bytes, crc of bytes), and the bytes
are one `Event` message.
"""

import os
import pathlib
import struct
import time
from collections.abc import Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types
_SESSION_START = 1  # SessionLog.SessionStatus.START


def _crc_table() -> list[int]:
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return table


_CRC_TABLE = _crc_table()


def _masked_crc32c(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
  crc ^= 0xFFFFFFFF
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(n: int) -> bytes:
  out = bytearray()
  while n > 0x7F:
    out.append(n & 0x7F | 0x80)
    n >>= 7
  out.append(n)
  return bytes(out)


def _field(number: int, wire: int, payload: bytes) -> bytes:
  length = _varint(len(payload)) if wire == _BYTES else b""
  return _varint(number << 3 | wire) + length + payload


def _event(step: int, body: bytes) -> bytes:
  wall_time = _field(1, _FIXED64, struct.pack("<d", time.time()))
  return wall_time + _field(2, _VARINT, _varint(step)) + body


def _float32(x: float) -> bytes:
  try:
    return struct.pack("<f", x)
  except OverflowError:  # a finite double beyond float32
    return struct.pack("<f", float("inf") if x > 0 else float("-inf"))


def _scalars(values: Mapping[str, float | int | str]) -> bytes:
  out = b""
  for tag, x in values.items():
    if not isinstance(x, str):  # TensorBoard's scalar page has no place for text
      out += _field(1, _BYTES, _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, _float32(x)))
  return out


def _frame(data: bytes) -> bytes:
  length = struct.pack("<Q", len(data))
  return (
    length
    + struct.pack("<I", _masked_crc32c(length))
    + data
    + struct.pack("<I", _masked_crc32c(data))
  )


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
    self._append(0, _field(3, _BYTES, b"brain.Event:2"))
    start = _field(1, _VARINT, _varint(_SESSION_START))
    self._append(first_step, _field(7, _BYTES, start))

  def _append(self, step: int, body: bytes) -> None:
    record = _frame(_event(step, body))
    if os.write(self._fd, record) != len(record):
      raise OSError(f"{self._path} took only a part of a record: is the disk full?")

  def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
    summary = _scalars(values)
    if summary:
      self._append(step, _field(5, _BYTES, summary))

  def summary(self, values: Mapping[str, float]) -> None:
    """TensorBoard has no notion of one value for a whole run."""

  def close(self, exit_code: int = 0) -> None:
    os.close(self._fd)
