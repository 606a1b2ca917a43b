"""Sweeps: lists of runs, written as plain Python.

A sweep file defines `runs(arg)`, which returns a list of (config, overrides):

  from nanosam.study.sweeps import product, together

  def runs(arg=None):
    grid = product({"opt.rho": [0.03, 0.1], "seed": [1, 2, 3]})
    return [("configs/mini.py:method=sam", overrides) for overrides in grid]

`together({"seed": [1, 2], "data_seed": [1, 2]})` pairs the values up instead. Both also take lists
of overrides, so they nest: product({"opt.rho": [...]}, together({...})).
"""

import itertools
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from nanosam import config as config_lib
from nanosam.optim.methods import row
from nanosam.run.record import CONFIG_FILE
from nanosam.run.validate import validate
from nanosam.study import runs as runs_lib
from nanosam.system import python_file
from nanosam.system.errors import UsageError

Overrides = dict[str, Any]
Spec = tuple[str, Overrides]  # FILE.py[:arguments] of a config, and what to change in it
Choices = Mapping[str, Sequence[Any]] | Sequence[Overrides]


def product(*choices: Choices) -> list[Overrides]:
  """Every combination."""
  points = itertools.product(*itertools.chain.from_iterable(map(_columns, choices)))
  return [_merge(parts) for parts in points]


def together(*choices: Choices) -> list[Overrides]:
  """First values with first values, and so on."""
  columns = list(itertools.chain.from_iterable(map(_columns, choices)))
  if len({len(column) for column in columns}) > 1:
    raise UsageError(
      f"together: the lists have {', '.join(str(len(c)) for c in columns)} values; make them equal"
    )
  return [_merge(parts) for parts in zip(*columns, strict=True)]


def _columns(choices: Choices) -> list[list[Overrides]]:
  if isinstance(choices, Mapping):
    return [[{key: value} for value in values] for key, values in choices.items()]
  return [list(choices)]


def _merge(parts: Iterable[Overrides]) -> Overrides:
  merged: Overrides = {}
  for part in parts:
    if twice := merged.keys() & part.keys():
      raise UsageError(f"a sweep sets {', '.join(sorted(twice))} twice; name each key once")
    merged |= part
  return merged


def load(spec: str) -> list[Spec]:
  """The runs of `FILE.py[:arg]`."""
  file, _, arg = spec.partition(":")

  def called(runs: Any) -> list[Spec]:
    place = f"sweep file {file}, line {runs.__code__.co_firstlineno}: runs()"
    found = runs(arg or None)
    if not isinstance(found, Iterable) or isinstance(found, str | Mapping):
      raise UsageError(f"{place} returned {type(found).__name__}; {SHAPE}")
    return [_spec(item, f"{place}, item {n}") for n, item in enumerate(found, 1)]

  return python_file.value("sweep", file, "runs", called, "()")


SHAPE = "expected a list such as [('configs/mini.py:method=sam', {'opt.rho': 0.1, 'seed': 1})]"


def _spec(item: Any, place: str) -> Spec:
  pair = isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2
  if not (pair and isinstance(item[0], str) and isinstance(item[1], Mapping)):
    raise UsageError(f"{place} is {str(item)[:100]!r}; {SHAPE}")
  return item[0], dict(item[1])


class Job(NamedTuple):
  """A run to train, or trained already."""

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

  @property
  def cost(self) -> float:
    """How long it takes, next to others: tokens, times parameters, times gradients a step."""
    direction, _, when = row(self.config.opt.method, self.config.opt)
    gradients = 1 + when.share if direction and direction.needs_gradient else 1
    parameters = config_lib.parameter_counts(self.config, self.config.data.vocab_size)["total"]
    return float(self.tokens * parameters * gradients)

  def stored(self) -> runs_lib.Run | None:
    """The run on disk, if it has begun."""
    if not (self.workdir / CONFIG_FILE).is_file():
      return None
    return runs_lib.read_run(self.workdir)


def resolve(spec: str, overrides: Overrides) -> ml_collections.ConfigDict:
  c = config_lib.load(spec)
  for key, value in overrides.items():
    config_lib.override(c, key, str(value))
  return c


def make_jobs(specs: Iterable[Spec], out: pathlib.Path) -> list[Job]:
  """Resolves and checks every run before any begins; refuses the same run twice."""
  jobs: dict[str, Job] = {}
  for number, (spec, overrides) in enumerate(specs, 1):
    try:
      c = resolve(spec, overrides)
      c.workdir = str(out)
      validate(c)
    except UsageError as e:
      raise UsageError(f"run {number} of the sweep, {spec} {overrides}: {e}") from e
    name = runs_lib.run_id(config_lib.to_dict(c))
    c.workdir = str(out / name)
    if first := jobs.get(name):
      raise UsageError(
        f"two runs of one id {name}: {first.spec} {first.overrides} and {spec} {overrides} train "
        "the same; remove one (adamw has no rho: list it once, outside the grid)"
      )
    jobs[name] = Job(name, spec, overrides, c, out / name)
  return list(jobs.values())
