"""The workdir's own record: config.json, and what may change when a run goes on."""

import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from nanosam import config as config_lib
from nanosam.errors import UsageError, UserError

CONFIG_FILE = "config.json"
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


def create(folder: str, what: str = "workdir") -> pathlib.Path:
  """Makes the folder and proves that it can be written to, before anything expensive."""
  path = pathlib.Path(folder)
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".probe{os.getpid()}"
    probe.write_text("")
    probe.unlink()
  except OSError as e:
    raise UsageError(f"cannot write to {what} {folder}: {e.strerror or e}") from e
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


def read_config(workdir: pathlib.Path) -> dict[str, Any]:
  """The config a run was made with, as plain values (its environment included)."""
  path = workdir / CONFIG_FILE
  try:
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
      raise ValueError("not an object")
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


def write_atomically(path: pathlib.Path, content: bytes) -> None:
  partial = path.with_name(path.name + ".partial")
  try:
    with open(partial, "wb") as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    os.replace(partial, path)
  except OSError as e:
    raise UserError(
      f"cannot write {path}: {e.strerror or e}; make room or fix the permissions, "
      "then run the same command again"
    ) from e
