"""What users write in Python files: configs, sweeps, methods."""

import pathlib
import runpy
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from nanosam.system.errors import UsageError, nearest

T = TypeVar("T")


def call(
  kind: str, file: str, function: str, argument: str | None, convert: Callable[[Any], T]
) -> T:
  """convert(function(argument)), with `function` as defined in `file`."""
  return value(kind, file, function, lambda defined: convert(defined(argument)), "()")


def value(kind: str, file: str, name: str, convert: Callable[[Any], T], parentheses: str = "") -> T:
  """convert(name), as defined in `file`.

  Whatever is wrong, in the file or with what it defines, becomes one UsageError with the file's
  name and line.
  """
  path = pathlib.Path(file)
  if not path.is_file():
    others = sorted(p.name for p in path.parent.glob("*.py"))
    known = nearest(path.name, others) if others else f"there is no .py file in {path.parent}"
    raise UsageError(f"{kind} file {file} does not exist; {known}")
  if path.suffix != ".py":
    raise UsageError(f"{kind} file {file} is not a .py file")
  try:
    defined = runpy.run_path(file, run_name=f"nanosam_{kind}")
    if name not in defined:
      raise UsageError(f"{kind} file {file} defines no {name}{parentheses}")
    return convert(defined[name])
  except UsageError:
    raise
  except Exception as e:
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    where = f"{file}, line {lines[-1]}" if lines else file
    reason = " ".join(str(e).split())
    if len(reason) > 300:  # ml_collections puts the whole config before what is wrong with a key
      reason = f"... {reason[-200:]}"
    raise UsageError(f"{kind} file {where}: {type(e).__name__}: {reason}") from e
