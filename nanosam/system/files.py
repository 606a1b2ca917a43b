"""Small files that are whole at every moment: a reader or a crash finds the old one or the new."""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from nanosam.system.errors import UserError


def write_atomically(path: pathlib.Path | epath.Path, content: bytes) -> None:
  partial = path.with_name(path.name + ".partial")
  with disk_errors(path):
    with partial.open("wb") as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    partial.replace(path)


@contextlib.contextmanager
def disk_errors(path: pathlib.Path | epath.Path) -> Iterator[None]:
  try:
    yield
  except OSError as e:
    raise UserError(
      f"cannot write {path}: {e.strerror or e}; make room or fix the permissions, "
      "then run the same command again"
    ) from e


def write_json(path: pathlib.Path, value: Any) -> None:
  write_atomically(path, json.dumps(strict_json(value), indent=2).encode())


def strict_json(value: Any) -> Any:
  """JSON has no infinity and no NaN: null stands for both."""
  if isinstance(value, Mapping):
    return {k: strict_json(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [strict_json(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
