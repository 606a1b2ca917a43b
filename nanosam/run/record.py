"""What a run's files say about it: config.json, and in metrics.jsonl how far it got."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from nanosam import config as config_lib
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import write_atomically

CONFIG_FILE = "config.json"
SEQUENCES_FILE = "eval_sequences.npz"  # the last evaluation, sequence by sequence
WEIGHTS = "weights"  # in the environment: what data.weights was, and what it took to make it
LINEAGE = "init_from"  # in the environment: the run and checkpoint that this one started from
ENVIRONMENT = "environment"  # the one entry of config.json that is not a config key
TAU = "tau/logit"  # in every record of a measurement of tau
PACKAGES = """
  nanosam jax jaxlib flax optax orbax-checkpoint grain sentencepiece numpy ml-collections
  tensorflow-datasets
""".split()


@dataclasses.dataclass
class Position:
  """How far a run got."""

  step: int = 0  # updates made
  evaluated: int = 0  # step of the last evaluation
  diagnosed: int = -1  # step of the last measurement of tau
  last_eval_loss: float = math.nan
  best_eval_loss: float = math.inf

  def add_evaluation(self, step: int, loss: float) -> None:
    self.evaluated, self.last_eval_loss = step, loss
    self.best_eval_loss = min(self.best_eval_loss, loss)  # a NaN is never the best

  def finished(self, steps: int) -> bool:
    return self.step == self.evaluated == steps


def position(workdir: pathlib.Path, step: int) -> Position:
  """The position after `step` updates, with the evaluations on record up to there."""
  at, path = Position(step), workdir / METRICS_FILE
  for record in read_metrics(path) if path.exists() else []:
    if record["step"] <= step:
      if "eval/loss" in record:
        at.add_evaluation(record["step"], record["eval/loss"])
      if TAU in record:
        at.diagnosed = record["step"]
  return at


def refuse_finished(workdir: pathlib.Path) -> None:
  """A finished run without checkpoints has nothing but its record: do not overwrite it."""
  if not has_record(workdir):
    return
  steps = read_config(workdir)["opt"]["num_train_steps"]
  if position(workdir, steps).finished(steps):
    raise UserError(
      f"{workdir} holds the record of a finished run without checkpoints, which training would "
      "overwrite: use another workdir, or remove this one"
    )


def environment(**facts: Any) -> dict[str, Any]:
  """What the run is made with and on, besides its settings."""
  devices = jax.devices()
  return {
    "command": ["python", "-m", _command(), *sys.argv[1:]],
    "git_commit": _git_commit(),
    "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "python": platform.python_version(),
    "packages": {name: _version(name) for name in PACKAGES},
    "devices": {
      "kind": devices[0].device_kind,
      "count": len(devices),
      "processes": jax.process_count(),
    },
    **facts,
  }


def _command() -> str:
  """The module that a person started: it may train as a part of its work."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  return spec.name if spec and spec.name.startswith("nanosam.") else "nanosam.train"


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git_commit() -> str | None:
  command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
  here = pathlib.Path(__file__).parent
  try:
    found = subprocess.check_output(command, cwd=here, stderr=subprocess.DEVNULL, timeout=10)
  except (OSError, subprocess.SubprocessError):
    return None
  return found.decode().strip() or None


def write_config(
  workdir: pathlib.Path, config: Mapping[str, Any], env: Mapping[str, Any], step: int
) -> dict[str, Any]:
  """Writes config.json for a run that starts or resumes at `step`, and returns its content."""
  changes = []  # settings and commits that the run was trained with before, and up to which step
  if step:
    old = read_config(workdir)
    before = old.pop(ENVIRONMENT, {})
    changes = before.get("changes", [])
    keys, commit = config_lib.changed_keys(old, config), before.get("git_commit")
    if keys or commit != env["git_commit"]:
      changes = [*changes, {"step": step, "keys": keys, "git_commit": commit}]
  content = {**config, ENVIRONMENT: {**env, "changes": changes} if changes else env}
  write_atomically(workdir / CONFIG_FILE, json.dumps(content, indent=2).encode())
  return content


def has_record(workdir: pathlib.Path) -> bool:
  """Whether a run has left more than its config here."""
  metrics = workdir / METRICS_FILE
  return (workdir / CONFIG_FILE).exists() and metrics.is_file() and metrics.stat().st_size > 0


def read_config(workdir: pathlib.Path | epath.Path) -> dict[str, Any]:
  """The config a run was made with, as plain values (its environment included)."""
  path = workdir / CONFIG_FILE
  try:
    config = json.loads(path.read_text())
    if not isinstance(config, dict) or not isinstance(config.get("opt"), dict):
      raise ValueError("not a run's config")
    return config
  except FileNotFoundError:
    raise UsageError(f"{workdir} holds no run: there is no {CONFIG_FILE}") from None
  except (OSError, ValueError) as e:
    raise UsageError(f"cannot read {path} ({e}); restore it or use another workdir") from e


def read_lineage(workdir: pathlib.Path) -> dict[str, Any] | None:
  return read_config(workdir).get(ENVIRONMENT, {}).get(LINEAGE)


def check_data(workdir: pathlib.Path, source: str, fingerprint: str) -> None:
  """Refuses to resume on other data than the run has seen; without a record there is none."""
  before = read_config(workdir).get(ENVIRONMENT, {}).get("data")
  if before not in (None, fingerprint):
    raise UserError(
      f"the data changed: {workdir} was trained on {before}, but {source} is now {fingerprint} "
      "(other files, or other package versions behind the embedded corpus); restore that data or "
      "use another workdir"
    )


def check_unchanged(workdir: pathlib.Path, config: Mapping[str, Any], allowed: bool) -> None:
  """Refuses to resume a run with settings that would change its result."""
  if allowed:
    return
  old = read_config(workdir)
  old.pop(ENVIRONMENT, None)
  if changed := config_lib.changed_keys(old, config):
    raise UsageError(
      f"{workdir} holds a run with other settings ({'; '.join(changed)}). Use another workdir, "
      "restore the settings, or say --config.allow_changed_keys=True"
    )
