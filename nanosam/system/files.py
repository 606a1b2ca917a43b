"""Files that are replaced whole, so that readers and crashes find the old or the new one; locks."""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from nanosam.system.errors import UserError, say

PARTIAL = ".partial"  # suffix of a file that is still being written


def write_atomically(path: pathlib.Path | epath.Path, content: bytes) -> None:
  partial = path.with_name(path.name + PARTIAL)
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


def build_folder(
  final: pathlib.Path, last: str, write: Callable[[pathlib.Path], None], verb: str, what: str
) -> pathlib.Path:
  """A folder that is there whole or not at all, built on first use; `last` is a file in it.

  Several processes may build it at once: the first to finish wins.
  """
  if (final / last).exists():
    return final
  say(f"{verb} {what} (once) ...")
  partial = final.parent / f".{final.name}-{uuid.uuid4().hex}"
  try:
    partial.mkdir(parents=True)
    try:
      write(partial)
      partial.rename(final)
    except OSError:
      if not (final / last).exists():  # otherwise another process was faster: use its copy
        raise
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  except OSError as e:
    raise UserError(
      f"cannot write {what} to {final.parent}: {e.strerror or e}; "
      "free some space or set NANOSAM_CACHE to another directory"
    ) from e
  return final


def lock_file(path: pathlib.Path, *, wait: bool = False) -> int:
  """Locks a folder, or a file, which is created if missing; returns the open descriptor.

  Closing it, or the end of the process, releases the lock. While another process holds the lock,
  this waits or raises BlockingIOError. A file system without locks is not locked.
  """
  flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
  descriptor = os.open(path, flags, 0o644)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    os.close(descriptor)
    raise
  except OSError:
    pass
  return descriptor


def write_json(path: pathlib.Path, value: Any) -> None:
  write_atomically(path, json.dumps(strict_json(value), indent=2).encode())


def strict_json(value: Any) -> Any:
  """JSON has neither infinity nor NaN: both become null."""
  if isinstance(value, Mapping):
    return {k: strict_json(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [strict_json(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
