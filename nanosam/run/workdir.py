"""The workdir's own record: config.json, and what may change when a run goes on."""

import concurrent.futures
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
from etils import epath

from nanosam import config as config_lib
from nanosam.run.cluster import Hosts
from nanosam.run.log import METRICS_FILE
from nanosam.system.errors import UsageError
from nanosam.system.files import write_atomically
from nanosam.system.remote import is_remote

CONFIG_FILE = "config.json"
SEQUENCES_FILE = "eval_sequences.npz"  # the last evaluation, sequence by sequence
ENVIRONMENT = "environment"  # the one entry of config.json that is not a config key
PACKAGES = (
  "nanosam",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "sentencepiece",
  "numpy",
  "ml-collections",
  "tensorflow-datasets",
)


class Workdir:
  """Where a run's files lie: on this machine, all in one place. remote_workdir.py has another."""

  def __init__(self, files: pathlib.Path, home: epath.Path):
    self.files = files  # config, metrics and what else the first process writes
    self.home = home  # checkpoints, which all processes write

  def __str__(self) -> str:
    return str(self.home)

  def upload(self) -> concurrent.futures.Future[None] | None:
    """Brings the files to where they are kept, in the background; None if they are there."""
    return None

  def check(self) -> None:
    """Raises if the workdir is no longer this run's."""

  def close(self) -> None:
    """Brings all files to where they are kept."""


def open_workdir(c: ml_collections.ConfigDict, hosts: Hosts) -> Workdir:
  if is_remote(c.workdir):
    from nanosam.run.bucket import RemoteWorkdir  # an extra that not everyone has

    return RemoteWorkdir(c.workdir, c.data.cache_dir, hosts)
  path = pathlib.Path(c.workdir)
  if hosts.first:
    claim(create(c.workdir))
  _check_shared(path, hosts)
  return Workdir(path, epath.Path(path))


def _check_shared(path: pathlib.Path, hosts: Hosts) -> None:
  """Processes write one checkpoint together, so they must see the same folder."""
  token = path / f".seen-{hosts.from_first(secrets.token_hex(8))}"
  if hosts.first:
    token.write_text("")
  hosts.gather("written")
  seen = hosts.gather(token.exists())
  if hosts.first:
    token.unlink()
  if blind := [str(i) for i, sees in enumerate(seen) if not sees]:
    raise UsageError(
      f"workdir {path} is not the same folder for all processes (not for {', '.join(blind)}): use "
      "a network file system, or a bucket (gs://...)"
    )


def create(workdir: str) -> pathlib.Path:
  """Makes the workdir and proves that it can be written to, before anything expensive."""
  path = pathlib.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".probe{os.getpid()}"
    probe.write_text("")
    probe.unlink()
  except OSError as e:
    raise UsageError(f"cannot write to workdir {workdir}: {e.strerror or e}") from e
  return path


def claim(workdir: pathlib.Path) -> None:
  """Keeps the workdir for this process until it ends: two runs in one place would ruin each other.

  For the one process of a run that writes.
  """
  lock = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # open until the process ends
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise UsageError(
      f"another process is training in {workdir}: wait for it, end it, or use another workdir"
    ) from None
  except OSError:  # a file system without locks
    pass


def environment(**facts: Any) -> dict[str, Any]:
  """Where and with what the run was made."""
  devices = jax.devices()
  return {
    "command": ["python", "-m", "nanosam.train", *sys.argv[1:]],
    "git_commit": _git_commit(),
    "python": platform.python_version(),
    "packages": {name: _version(name) for name in PACKAGES},
    "devices": {
      "kind": devices[0].device_kind,
      "count": len(devices),
      "processes": jax.process_count(),
    },
    **facts,
  }


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git_commit() -> str | None:
  here = pathlib.Path(__file__).parent
  try:
    run = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=40"],
      cwd=here,
      capture_output=True,
      text=True,
      timeout=10,
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return run.stdout.strip() or None if run.returncode == 0 else None


def write_config(workdir: pathlib.Path, config: Mapping[str, Any], env: Mapping[str, Any]) -> None:
  write_atomically(
    workdir / CONFIG_FILE, json.dumps({**config, ENVIRONMENT: env}, indent=2).encode()
  )


def has_record(workdir: pathlib.Path) -> bool:
  """Whether a run has left anything here but its config."""
  metrics = workdir / METRICS_FILE
  return (workdir / CONFIG_FILE).exists() and metrics.is_file() and metrics.stat().st_size > 0


def changes(
  workdir: pathlib.Path, config: Mapping[str, Any], env: Mapping[str, Any], step: int
) -> dict[str, Any]:
  """For the environment of a run that goes on at `step`: with what else it was made until there."""
  if not step:
    return {}
  old = read_config(workdir)
  before = old.pop(ENVIRONMENT, {})
  history = before.get("changes", [])
  keys, commit = config_lib.changed_keys(old, config), before.get("git_commit")
  if keys or commit != env["git_commit"]:
    history = [*history, {"step": step, "keys": keys, "git_commit": commit}]
  return {"changes": history} if history else {}


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


def check_unchanged(workdir: pathlib.Path, config: Mapping[str, Any], allowed: bool) -> None:
  """Refuses to go on with a run under keys that would change its result."""
  if allowed:
    return
  old = read_config(workdir)
  old.pop(ENVIRONMENT, None)
  if changed := config_lib.changed_keys(old, config):
    raise UsageError(
      f"{workdir} holds a run with other settings ({'; '.join(changed)}). Use another workdir, "
      "restore the settings, or say --config.allow_changed_keys=True"
    )
