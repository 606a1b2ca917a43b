"""Imports point one way, and nothing imports a command."""

import ast
import pathlib

import pytest
from helpers.training import ROOT

# Every folder may import those before it; `data` and `optim` know nothing of each other.
ORDER = ("system", "config", "data", "optim", "model", "run", "curvature", "study", "paper")
STRANGERS = {("optim", "data"), ("optim", "config"), ("optim", "system")}
COMMANDS_IN_DATA = tuple(f"nanosam.data.{name}" for name in ("prepare", "inspect", "difficulty"))
# What a look at a config or a path must not wait for.
HEAVY = ("jax", "flax", "optax", "orbax", "sentencepiece", "grain", "tensorflow_datasets")
OUTSIDE = {"scripts", "launch", "configs"}  # run by people, never imported


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, known: set[str]) -> set[str]:
  """Modules that a file imports, at the top or anywhere else; ours by their full name."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative import"
      inside = {f"{node.module}.{alias.name}" for alias in node.names}
      found |= (inside & known) or {node.module}
  return found


def read() -> dict[str, set[str]]:
  files = [p for p in (ROOT / "nanosam").rglob("*.py")]
  known = {module_name(p) for p in files}
  return {module_name(p): imports(p.read_text(), known) for p in files}


def room(module: str) -> str:
  """The folder of a module of ours, or `command`."""
  if module in COMMANDS_IN_DATA:
    return "command"
  name = module.removeprefix("nanosam").strip(".").partition(".")[0]
  return name if name in ORDER else "command"


def complaints(graph: dict[str, set[str]]) -> list[str]:
  """What is wrong with these imports, a line each."""
  found = []
  for module, targets in graph.items():
    if module == "nanosam":
      continue
    for target in sorted(t for t in targets if t.startswith("nanosam.")):
      mine, other = room(module), room(target)
      if other == "command":
        found.append(f"{module} imports the command {target}")
      elif mine != "command" and (
        ORDER.index(other) > ORDER.index(mine) or (mine, other) in STRANGERS
      ):
        found.append(f"{module} imports {target}: {mine} comes before {other}")
  return [*found, *cycles(graph), *heavy(graph)]


def cycles(graph: dict[str, set[str]]) -> list[str]:
  found, done = [], set()

  def walk(module: str, trail: tuple[str, ...]) -> None:
    if module in trail:
      found.append(" -> ".join((*trail[trail.index(module) :], module)))
    elif module not in done:
      for target in sorted(graph.get(module, ())):
        walk(target, (*trail, module))
      done.add(module)

  for module in graph:
    walk(module, ())
  return found


def reached(graph: dict[str, set[str]], module: str) -> set[str]:
  """All that an import of a module imports, packages above it included."""
  seen, waiting = set(), [module]
  while waiting:
    name = waiting.pop()
    if name not in seen:
      seen.add(name)
      waiting += [*graph.get(name, ()), *([name.rpartition(".")[0]] if "." in name else [])]
  return seen


def heavy(graph: dict[str, set[str]]) -> list[str]:
  return [
    f"{module} reaches {name}"
    for module in graph
    if room(module) in ("system", "config")
    for name in sorted(reached(graph, module))
    if name.partition(".")[0] in HEAVY
  ]


def test_imports_point_one_way():
  assert complaints(read()) == []


def test_optim_needs_jax_and_optax_alone():
  for module, targets in read().items():
    if room(module) == "optim":
      others = {t.partition(".")[0] for t in targets if not t.startswith("nanosam.optim")}
      assert others <= {"jax", "optax", "collections", "typing", "dataclasses", "math", "re"}, (
        module
      )


def test_nothing_imports_what_is_run_by_people():
  for module, targets in read().items():
    assert not OUTSIDE & {t.partition(".")[0] for t in targets}, module
  for folder in OUTSIDE:
    for path in (ROOT / folder).rglob("*.py"):
      found = imports(path.read_text(), set(read()))
      names = {p.stem for p in (ROOT / folder).rglob("*.py")}
      assert not (OUTSIDE | names) & {t for t in found if "." not in t}, path
      assert not [t for t in found if t.startswith("nanosam.") and room(t) == "command"], path


def test_at_most_twenty_entries_at_the_top():
  assert len([p for p in (ROOT / "nanosam").iterdir() if p.name != "__pycache__"]) <= 20


@pytest.mark.parametrize(
  "module, target, said",
  [
    ("nanosam.data.store", "nanosam.run.step", "data comes before run"),
    ("nanosam.optim.base", "nanosam.data.batch", "optim comes before data"),
    ("nanosam.run.step", "nanosam.train", "imports the command nanosam.train"),
    ("nanosam.system.files", "nanosam.system.errors", "nanosam.system.files -> nanosam.system.err"),
    ("nanosam.system.errors", "sentencepiece", "nanosam.system.errors reaches sentencepiece"),
    ("nanosam.config", "jax", "nanosam.config reaches jax"),
  ],
)
def test_a_wrong_import_is_noticed(module, target, said):
  graph = read()
  graph[module] = {*graph[module], target}
  if target == "nanosam.system.errors":
    graph[target] = {*graph[target], module}
  assert any(said in line for line in complaints(graph))
