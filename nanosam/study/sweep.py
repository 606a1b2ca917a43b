"""What a sweep is: a list of runs, written as plain Python.

A sweep file defines `runs(arg)`, which returns a list of (config, overrides):

  from nanosam.study.sweep import product, together

  def runs(arg=None):
    grid = product({"opt.rho": [0.03, 0.1], "seed": [1, 2, 3]})
    return [("configs/mini.py:method=sam", overrides) for overrides in grid]

`together({"seed": [1, 2], "data_seed": [1, 2]})` takes the values side by side instead; both take
lists of overrides as well, so they nest: product({"opt.rho": [...]}, together({...})).
"""

import importlib.util
import itertools
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from nanosam import config as config_lib
from nanosam.run.validate import validate
from nanosam.study import runs as runs_lib
from nanosam.system.errors import UsageError

# Where to look for rho at the paper's sizes. Its best SAM has rho 0.1, its smallest: begin below.
# Preconditioned directions spread over all coordinates rather than the few with large gradients,
# and bear more.
PAPER_RHO = {
  **dict.fromkeys(("sam", "func_sam", "momentum_func_sam"), (0.01, 0.03, 0.1, 0.3)),
  **dict.fromkeys(("precond_sam", "precond_func_sam"), (0.1, 0.3, 1.0, 3.0)),
}

Overrides = dict[str, Any]
Axis = Mapping[str, Sequence[Any]] | Sequence[Overrides]


def product(*axes: Axis) -> list[Overrides]:
  """Every combination."""
  points = itertools.product(*itertools.chain.from_iterable(map(_split, axes)))
  return [_merge(parts) for parts in points]


def together(*axes: Axis) -> list[Overrides]:
  """First values with first values, and so on."""
  columns = list(itertools.chain.from_iterable(map(_split, axes)))
  if len({len(column) for column in columns}) > 1:
    raise UsageError(
      f"together: the lists have {', '.join(str(len(c)) for c in columns)} values; make them equal"
    )
  return [_merge(parts) for parts in zip(*columns, strict=True)]


def _split(axis: Axis) -> list[list[Overrides]]:
  if isinstance(axis, Mapping):
    return [[{key: value} for value in values] for key, values in axis.items()]
  return [list(axis)]


def _merge(parts: Iterable[Overrides]) -> Overrides:
  merged: Overrides = {}
  for part in parts:
    if twice := merged.keys() & part.keys():
      raise UsageError(f"a sweep sets {', '.join(sorted(twice))} twice; name each key once")
    merged |= part
  return merged


def tuned(
  config: str, methods: Sequence[str], *, seeds: int, tag: str, **arguments: Sequence[Any]
) -> list[tuple[str, Overrides]]:
  """Every method at each rho of PAPER_RHO, adamw once, for every combination of the arguments.

  Run k has seed k and data_seed k, so that methods are paired.
  """
  numbers = range(1, seeds + 1)
  shared = product({"wandb.tags": [tag]}, together({"seed": numbers, "data_seed": numbers}))
  runs = []
  for point in product({**arguments, "method": methods}):
    words = ",".join(f"{k}={v}" for k, v in point.items())
    rhos = product({"opt.rho": PAPER_RHO[point["method"]]} if point["method"] in PAPER_RHO else {})
    runs += [(f"{config}:{words}", overrides) for overrides in product(rhos, shared)]
  return runs


class Planned(NamedTuple):
  """A run to be made, or made already."""

  id: str
  spec: str  # of the config file
  overrides: Overrides
  config: ml_collections.ConfigDict  # resolved and valid
  workdir: pathlib.Path

  def arguments(self, workdir: object) -> list[str]:
    """Of nanosam.train."""
    overrides = [f"--config.{key}={value}" for key, value in self.overrides.items()]
    return [f"--config={self.spec}", *overrides, f"--config.workdir={workdir}"]

  @property
  def command(self) -> list[str]:
    return [sys.executable, "-m", "nanosam.train", *self.arguments(self.workdir)]

  @property
  def tokens(self) -> int:
    c = self.config
    return c.opt.num_train_steps * c.batch_size * c.model.L

  def stored(self) -> runs_lib.Run | None:
    """What there is of it on disk."""
    if not (self.workdir / "config.json").is_file():
      return None
    return runs_lib.read_run(self.workdir)


def plan(runs: Iterable[tuple[str, Overrides]], out: pathlib.Path) -> list[Planned]:
  """Resolves and checks every run before any begins; refuses the same run twice."""
  planned: dict[str, Planned] = {}
  for spec, overrides in runs:
    c = config_lib.load(spec)
    for key, value in overrides.items():
      config_lib.override(c, key, str(value))
    name = runs_lib.run_id(config_lib.to_dict(c))
    c.workdir = str(out / name)
    validate(c)
    if name in planned:
      first = planned[name]
      raise UsageError(
        f"two runs of one id {name}: {first.spec} {first.overrides} and {spec} {overrides} train "
        "the same; take one out (adamw has no rho: give it once, outside the grid)"
      )
    planned[name] = Planned(name, spec, overrides, c, out / name)
  return list(planned.values())


def load(spec: str) -> list[tuple[str, Overrides]]:
  """The runs of `FILE.py[:arg]`."""
  file, _, arg = spec.partition(":")
  if not pathlib.Path(file).is_file():
    raise UsageError(f"sweep file {file} does not exist")
  module_spec = importlib.util.spec_from_file_location("nanosam_sweep_file", file)
  if module_spec is None or module_spec.loader is None:
    raise UsageError(f"sweep file {file} is not a Python file: its name must end in .py")
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
    return [(str(config), dict(overrides)) for config, overrides in module.runs(arg or None)]
  except UsageError:
    raise
  except Exception as e:  # whatever is wrong in the user's file, say where, in one line
    line = " ".join(str(e).split())
    raise UsageError(f"sweep file {file}: {type(e).__name__}: {line}") from e
