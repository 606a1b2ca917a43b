"""Methods in a file of yours: opt.method=path/to/file.py:NAME.

NAME is a `Method` (nanosam/optim/methods.py), a direction and a path. It becomes a row of the
table, and opt.method_sha256 records what the file said: resuming under another one is refused.
"""

import hashlib
import pathlib
from typing import Any

import ml_collections

from nanosam.optim.methods import METHODS, Method
from nanosam.system import python_file
from nanosam.system.errors import UsageError, UserError


def split(method: str) -> tuple[str, str] | None:
  """The file and the name in it; None of a method that is a row of the table."""
  file, colon, name = method.rpartition(":")
  return (file, name) if colon and file.endswith(".py") else None


def short_name(method: str) -> str:
  """What a run of it is called."""
  return (split(method) or ("", method))[1]


def adopt(c: ml_collections.ConfigDict) -> None:
  """Reads the method's file, if it has one, and records which it is: its full path, and a hash."""
  own = split(c.opt.method)
  c.opt.method_sha256 = ""
  if own is None:
    return
  path = pathlib.Path(own[0]).expanduser().absolute()
  name = f"{path}:{own[1]}"
  if own[1] in METHODS:
    raise UsageError(f"opt.method={c.opt.method}: {own[1]} is one of ours; give yours another name")
  METHODS[name] = python_file.value("method", str(path), own[1], _checked)
  c.opt.method, c.opt.method_sha256 = name, digest(path)


def restore(workdir: object, c: ml_collections.ConfigDict) -> None:
  """The method of a stored run."""
  own, recorded = split(c.opt.method), c.opt.method_sha256
  if own is None:
    return
  path = pathlib.Path(own[0])
  if not path.is_file() or digest(path) != recorded:
    state = "has changed since" if path.is_file() else "is gone"
    raise UserError(
      f"{workdir} was trained with {own[1]} of {path}, which {state}: put back the file with "
      f"sha256 {recorded[:12]}..."
    )
  adopt(c)


def digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()


def _checked(found: Any) -> Method:
  if not isinstance(found, Method):
    raise UsageError(
      f"it is a {type(found).__name__}, not a Method: write NAME = Method(direction, path), as in "
      "the README"
    )
  return found
