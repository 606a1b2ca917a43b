"""metrics.jsonl, the record of truth of a run: one JSON object per line, written and read back.

The record of step s describes the state after s updates: its evaluation is of that state, its
loss, norms and rates are those of the s-th update. A run that resumes from the checkpoint of step R
keeps the records with step <= R and writes the later ones again.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from etils import epath

from nanosam.system.errors import UserError
from nanosam.system.files import disk_errors, write_atomically

Value = float | int | str
METRICS_FILE = "metrics.jsonl"
# JSON has no such numbers. These spellings, as strings, keep each line readable by strict parsers.
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
  """Writes one record per line, `step` first; it is in the file as soon as write() returns."""

  def __init__(self, path: str | os.PathLike[str], *, last_step: int):
    """Keeps the records up to `last_step`."""
    self._path = pathlib.Path(path)
    with disk_errors(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if self._path.is_file():  # drops records past `last_step`, and a torn last line
        records = _parse(self._path)
        kept = b"".join(line + b"\n" for line, record in records if record["step"] <= last_step)
        if kept != self._path.read_bytes():
          write_atomically(self._path, kept)
      self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    record = {"step": step} | {k: _encode(v) for k, v in values.items() if k != "step"}
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    with disk_errors(self._path):
      while line:  # one system call, unless the disk takes only part of the line
        line = line[os.write(self._fd, line) :]

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    with disk_errors(self._path):
      os.close(self._fd)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The records of a metrics.jsonl; "NaN", "Infinity" and "-Infinity" come back as floats."""
  return [{k: _decode(v) for k, v in record.items()} for _, record in _parse(epath.Path(path))]


def _parse(path: epath.Path | pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
  """(line, record) pairs. A torn last line is dropped; damage anywhere else is an error."""
  lines = path.read_bytes().split(b"\n")
  pairs = []
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      record["step"] + 0
    except (ValueError, TypeError, KeyError) as e:
      if number == len(lines):  # empty, or torn when the process died
        break
      raise UserError(f"{path} line {number} is not a metrics record: repair or remove it") from e
    pairs.append((line, record))
  return pairs


def _encode(value: Value) -> Value:
  return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(value: Any) -> Any:
  return _NONFINITE.get(value, value) if isinstance(value, str) else value
