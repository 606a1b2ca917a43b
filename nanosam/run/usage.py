"""The help of `train`: every key with its default, what config.py says of it, and its choices."""

import ast
import functools
import inspect
import io
import math
import textwrap
import tokenize
from typing import Any

from nanosam import config as config_lib
from nanosam.run.validate import CHOICES

# Where to start the search for rho: the RMS of eps in a coordinate, from widths 32 and 64 of
# results/mini. The larger model was best with the smaller or the same value.
TYPICAL_RMS = 3e-5
RMS = {"precond_sam": 1e-5}
WIDTH = 100


def starting_rho(size: str, method: str) -> float:
  c = config_lib.default(size=size)
  parameters = config_lib.parameter_counts(c, config_lib.PAPER_VOCABULARY)["total"]
  return RMS.get(method, TYPICAL_RMS) * math.sqrt(parameters)


def rho_table() -> str:
  """Values to start from, by method and size."""
  rows = [("", *config_lib.SIZES)]
  for name, method in (("precond_sam", "precond_sam"), ("the others", "sam")):
    rows.append((name, *(f"{starting_rho(size, method):.2g}" for size in config_lib.SIZES)))
  return "\n".join("  " + "".join(f"{cell:<12}" for cell in row).rstrip() for row in rows)


def text() -> str:
  lines = ["Keys, their defaults and their meaning:"]
  said = comments()
  for key, value in config_lib.flat(config_lib.default()).items():
    lines += _entry(f"  --config.{key}={value}", _meaning(said.get(key, ""), CHOICES.get(key, ())))
  lines += [
    "",
    "opt.rho to start from, with a vocabulary of 32,101; try a third of it and three times it. Not",
    "tested at scale. asam measures otherwise: choose a rho that makes opt/eps_rms 3e-5.",
    rho_table(),
  ]
  return "\n".join(lines)


def _meaning(comment: str, choices: Any) -> str:
  """The comment, and those choices that it does not name."""
  names = [str(choice) for choice in choices]
  if all(name in comment for name in names):
    return comment
  return f"{comment}: {', '.join(names)}" if comment else " | ".join(names)


def _entry(flag: str, meaning: str) -> list[str]:
  column = 46
  lines = textwrap.wrap(meaning, WIDTH - column)
  if len(flag) >= column - 1 or not lines:
    return [flag, *(" " * column + line for line in lines)]
  first, *rest = lines
  return [f"{flag:<{column}}{first}", *(" " * column + line for line in rest)]


@functools.cache
def comments() -> dict[str, str]:
  """What config.py says beside each key, or in the lines right above it."""
  source = inspect.getsource(config_lib)
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  notes = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
  functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
  sections = _sections(next(f for f in functions if f.name == "default"))
  return {
    key: _note(notes, node)
    for function in functions
    if function.name in sections
    for node in function.body
    for key in _keys(node, sections[function.name])
  }


def _note(notes: dict[int, tokenize.TokenInfo], node: ast.stmt) -> str:
  block: list[tokenize.TokenInfo] = []
  if beside := notes.get(node.end_lineno or 0):
    block = [beside]
  else:
    line = node.lineno - 1
    while line in notes and notes[line].line.lstrip().startswith("#"):
      block.insert(0, notes[line])
      line -= 1
  return " ".join(token.string.lstrip("# ") for token in block)


def _sections(default: ast.FunctionDef) -> dict[str, str]:
  """Which part of the config a function makes: {"_opt": "opt."}."""
  found = {"default": ""}
  for node in default.body:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
      made_by, target = node.value.func, node.targets[0]
      if isinstance(made_by, ast.Name) and isinstance(target, ast.Attribute):
        found[made_by.id] = f"{target.attr}."
  return found


def _keys(node: ast.stmt, section: str) -> list[str]:
  """The keys that a statement such as `c.mesh.data = 1` or `m.N, m.H = 1, 2` sets."""
  if not isinstance(node, ast.Assign):
    return []
  targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
  return [
    section + ast.unparse(target).partition(".")[2]
    for target in targets
    if isinstance(target, ast.Attribute)
  ]
