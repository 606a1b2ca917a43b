"""Runs on disk, and what makes two of them the same run."""

import hashlib
import json
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nanosam import config as config_lib
from nanosam.optim import guard
from nanosam.optim.methods import METHODS
from nanosam.run import own_method
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.run.record import (
  CONFIG_FILE,
  ENVIRONMENT,
  LINEAGE,
  SEQUENCES_FILE,
  WEIGHTS,
  read_config,
)
from nanosam.system.errors import UserError

FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"

METHOD_FILE = "opt.method_sha256"  # of a method in a file of the user's
# Keys without effect where nothing is perturbed.
_OF_PERTURBATION = re.compile(
  r"opt\.(rho.*|phi|angle_form|precond_.*|asam_eta|momentum_sign|perturb.*|every|look_alpha"
  r"|ascent_fraction|ae_.*|(weight|data|top)_share)"
)


class Axis(NamedTuple):
  """What an eval loss is plotted against."""

  key: str  # of an eval record
  unit: str
  label: str


AXES = {
  "steps": Axis("step", "steps", "steps"),
  "tokens": Axis("tokens", "tokens", "tokens"),
  "compute": Axis("compute", "FLOPs", "compute (FLOPs)"),
  "time": Axis("time", "s", "training time (s)"),
}


def training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
  """The settings that decide a run's result, flat; keys added since the run have their default."""
  stored = config_lib.flat(config_lib.current(config))
  values = {**config_lib.flat(config_lib.default()), **stored}
  # Of a method in a file of the user's the name; the file itself is not needed here.
  method = values["opt.method"] = own_method.short_name(values["opt.method"])
  plain = not values[METHOD_FILE] and METHODS[method].direction is None
  return {
    key: value
    for key, value in values.items()
    if not config_lib.FREE_KEYS.fullmatch(key)
    and not key.startswith(ENVIRONMENT + ".")
    and not (plain and _OF_PERTURBATION.fullmatch(key))
    and not (key == METHOD_FILE and not value)
  }


def run_id(config: Mapping[str, Any]) -> str:
  """A readable name and a hash of the settings.

  Only settings that differ from the default enter the hash: a key added to the code later does not
  rename existing runs.
  """
  keys, usual = training_keys(config), config_lib.flat(config_lib.default())
  special = {k: v for k, v in keys.items() if v != usual.get(k)}
  digest = hashlib.sha256(json.dumps(special, sort_keys=True).encode()).hexdigest()[:8]
  parts = [keys["opt.method"], f"D{keys['model.D']}", f"n{keys['opt.num_train_steps']}"]
  parts += [f"lr{keys['opt.peak_learning_rate']:g}", f"wd{keys['opt.weight_decay']:g}"]
  if "opt.rho" in keys:
    parts.append(f"rho{keys['opt.rho']:g}")
  return "-".join([*parts, f"s{keys['seed']}", digest])


class Run(NamedTuple):
  path: pathlib.Path
  keys: dict[str, Any]  # training_keys
  environment: dict[str, Any]
  evals: list[dict[str, Any]]  # records with eval/loss, by step
  step: int  # of the last record
  state: str
  nll_R: np.ndarray  # of the last evaluation, by sequence; empty unless finished
  weight_R: np.ndarray
  before: float = 0.0  # FLOPs on the proxy behind data.weights and on its losses; in `compute`

  @property
  def replicate(self) -> tuple[int, int]:
    """Runs that share it start from the same parameters and see the same data in the same order."""
    return self.keys["seed"], self.keys["data_seed"]

  @property
  def steps(self) -> int:
    return self.keys["opt.num_train_steps"]

  @property
  def lineage(self) -> str:
    """The run, step and parameters that this one started from; "" if it started from none."""
    if not (found := self.environment.get(LINEAGE)):
      return ""
    return f"{found['workdir']}, step {found['step']}, parameters {found['parameters']}"

  def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, eval loss) of every evaluation; `key` is that of an axis."""
    return curve(self.evals, key, "eval/loss")


def curve(records: Iterable[Mapping[str, Any]], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
  """Two columns of the records that have a y."""
  points = [(r[x], r[y]) for r in records if y in r]
  return np.array([a for a, _ in points], float), np.array([b for _, b in points], float)


def read_run(path: pathlib.Path) -> Run:
  """Raises a UserError if there is no run in `path`, or a damaged one."""
  config = read_config(path)
  environment = config.pop(ENVIRONMENT, {})
  try:
    keys = training_keys(config)
  except KeyError as e:
    raise UserError(f"{path}: config.json is from another program or version: it has no {e}") from e
  metrics = path / METRICS_FILE
  records = read_metrics(metrics) if metrics.is_file() else []
  # Every run pays for its weights in full, though runs may share them.
  before = float(sum(environment.get(WEIGHTS, {}).get("flops", {}).values()))
  evals = [_with_cost(r, before) for r in records if "eval/loss" in r]
  step, steps = (records[-1]["step"] if records else 0), keys["opt.num_train_steps"]
  nll_R, weight_R, at = _sequences(path / SEQUENCES_FILE)
  if evals and evals[-1]["step"] == at == steps:
    state = FINISHED if math.isfinite(evals[-1]["eval/loss"]) else DIVERGED
  else:
    state = DIVERGED if records and _aborted(keys, records[-1]) else UNFINISHED
  if state != FINISHED:
    nll_R = weight_R = np.empty(0)
  return Run(path, keys, environment, evals, step, state, nll_R, weight_R, before)


def _with_cost(record: dict[str, Any], before: float) -> dict[str, Any]:
  return {**record, "compute": record["compute"] + before} if "compute" in record else record


def _sequences(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, int]:
  try:
    with np.load(path) as f:
      return f["nll"], f["weight"], int(f["step"])
  except FileNotFoundError:
    return np.empty(0), np.empty(0), -1
  except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as e:
    raise UserError(f"{path} is damaged ({e}): {write_again(path.parent)}") from e


def write_again(workdir: pathlib.Path) -> str:
  return f"write it again with python -m nanosam.evaluate --workdir={workdir} --save"


def _aborted(keys: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
  """Whether the guard ended the run at this record."""
  policies = SimpleNamespace(
    **{name: keys[f"guard.{name}"] for name in ("policy", "perturbed", "max_skips")}
  )
  counts = guard.Counts(*(record.get(f"guard/{name}", 0) for name in guard.Counts._fields))
  return bool(guard.must_abort(policies, counts))


def find_runs(folders: Iterable[str | pathlib.Path]) -> tuple[list[Run], list[str]]:
  """Every run at or below the folders, and a line for each that cannot be used in full.

  Refuses (UserError) copies of one run, which would count as two seeds.
  """
  runs, notes = all_runs(folders)
  for first, copy in find_copies(runs):
    raise UserError(
      f"{first.path} and {copy.path} are one run (same settings and seeds, id "
      f"{run_id(copy.keys)}): it would count twice; move one of them away"
    )
  return runs, notes


def find_copies(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
  """The first of its id, and another; for every other one."""
  first: dict[str, Run] = {}
  pairs = [(first.setdefault(run_id(run.keys), run), run) for run in runs]
  return [(one, other) for one, other in pairs if one is not other]


def all_runs(folders: Iterable[str | pathlib.Path]) -> tuple[list[Run], list[str]]:
  """Like find_runs, with every copy of a run."""
  paths: dict[pathlib.Path, pathlib.Path] = {}  # by real path: a folder given twice counts once
  for folder in map(pathlib.Path, folders):
    if not folder.is_dir():
      raise UserError(f"no such folder: {folder}; give workdirs, or folders of workdirs")
    found = {p.parent for p in folder.rglob(METRICS_FILE)}
    found |= {p.parent for p in folder.rglob(CONFIG_FILE) if "wandb" not in p.parts}
    # A run inside another's workdir belongs to that one: survive fine-tunes there.
    outer = [p for p in sorted(found) if not found.intersection(p.parents)]
    paths |= {p.resolve(): p for p in outer}
  runs, notes = [], []
  for path in paths.values():
    try:
      run = read_run(path)
    except UserError as e:
      notes.append(f"left out {path}: {e}")
      continue
    runs.append(run)
    if run.state != FINISHED:
      notes.append(f"left out {path}: {_why_not(run)}")
  return runs, notes


def _why_not(run: Run) -> str:
  where = f"at step {run.step} of {run.steps}"
  if run.state == DIVERGED:
    return f"diverged {where}"
  if run.evals and run.evals[-1]["step"] == run.steps:
    return f"its {SEQUENCES_FILE} is not of the last step: {write_again(run.path)}"
  return f"unfinished {where}; run its command again to resume it"
