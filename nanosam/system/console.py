"""The command `nanosam NAME ...`: the same as `python -m nanosam.NAME ...`."""

import ast
import pathlib
import runpy
import sys

from nanosam.system import errors
from nanosam.system.errors import UsageError, nearest

PACKAGE = pathlib.Path(__file__).parents[1]


def main() -> None:
  errors.run(dispatch)


def dispatch(argv: list[str]) -> None:
  found = commands()
  if not argv[1:] or argv[1] in ("-h", "--help"):
    return print(usage(found))
  name, *rest = argv[1:]
  if name not in found:
    raise UsageError(f"unknown command '{name}': {nearest(name, found)}")
  module = found[name].relative_to(PACKAGE.parent).with_suffix("")
  sys.argv = [f"nanosam {name}", *rest]
  runpy.run_module(".".join(module.parts), run_name="__main__", alter_sys=True)


def commands() -> dict[str, pathlib.Path]:
  """By name; read, not imported, which takes seconds."""
  files = sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("data/*.py")])
  return {f.stem: f for f in files if "\n  errors.run(main)\n" in f.read_text()}


def usage(found: dict[str, pathlib.Path]) -> str:
  """The commands, each with how its text begins."""
  lines = ["usage: nanosam COMMAND ...; nanosam COMMAND --help says more", ""]
  for name, file in found.items():
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    lines.append(f"  {name:10} {' '.join(text.partition(chr(10) * 2)[0].split())}")
  return "\n".join(lines)
