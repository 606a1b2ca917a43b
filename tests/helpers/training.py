"""Commands of nanosam in processes of their own, as a person starts them."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanosam.run.metrics_file import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "helpers" / "tiny_config.py"


@dataclasses.dataclass
class Outcome:
  code: int
  out: str
  err: str

  def says_in_one_line(self, *parts: str) -> None:
    """stderr ends with one line that holds all parts, and there is no traceback."""
    assert "Traceback" not in self.err, self.err
    *_, last = self.err.strip().split("\n")
    assert last.startswith("nanosam: "), self.err
    for part in parts:
      assert part in last, (part, last)


@dataclasses.dataclass
class Commands:
  cache: pathlib.Path  # of the corpus and of compiled code
  extra: dict[str, str] = dataclasses.field(default_factory=dict)  # of the environment

  def environment(self, devices: int, fault: str) -> dict[str, str]:
    return {
      **os.environ,
      "NANOSAM_CACHE": str(self.cache),
      "NANOSAM_TEST_FAULT": fault,
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
      "JAX_PLATFORMS": "cpu",
      **self.extra,
    }

  def start(self, module: str, *words: str, devices: int = 1, fault: str = "") -> subprocess.Popen:
    return subprocess.Popen(
      [sys.executable, "-m", f"nanosam.{module}", *words],
      cwd=ROOT,
      env=self.environment(devices, fault),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,  # a group of its own, as for a command on a terminal
    )

  def __call__(self, module: str, *words: str, devices: int = 1, fault: str = "") -> Outcome:
    process = self.start(module, *words, devices=devices, fault=fault)
    try:
      out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      raise
    return Outcome(process.returncode, out, err)

  def train(
    self, workdir: pathlib.Path, devices: int = 1, fault: str = "", **overrides: object
  ) -> Outcome:
    words = [f"--config={CONFIG}", f"--config.workdir={workdir}"]
    words += [f"--config.{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return self("train", *words, devices=devices, fault=fault)


def steps(workdir: pathlib.Path) -> list[int]:
  return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def state(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """Every array of a checkpoint."""
  path = workdir / "checkpoints" / str(step) / "state"
  reader = ocp.PyTreeCheckpointer()
  saved = reader.metadata(path).item_metadata.tree
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
  return dict(_leaves(reader.restore(path, restore_args=as_numpy)))


def _leaves(tree, prefix=()):
  if isinstance(tree, dict):
    return [leaf for k, v in tree.items() for leaf in _leaves(v, (*prefix, k))]
  if isinstance(tree, list | tuple):
    return [leaf for k, v in enumerate(tree) for leaf in _leaves(v, (*prefix, k))]
  return [] if tree is None else [(prefix, np.asarray(tree))]


def losses(workdir: pathlib.Path) -> list[tuple[int, str, float]]:
  """(step, name, value) of every loss in metrics.jsonl, in the order of the file."""
  return [
    (record["step"], name, record[name])
    for record in read_metrics(workdir / "metrics.jsonl")
    for name in ("train/loss", "eval/loss", "eval/loss_sem")
    if name in record
  ]


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
  """The same final parameters and optimizer state, bit by bit, and the same records."""
  assert losses(a) == losses(b)
  last = steps(a)[-1]
  assert steps(b)[-1] == last
  one, other = state(a, last), state(b, last)
  assert one.keys() == other.keys() and len(one) > 10
  for path, x in one.items():
    np.testing.assert_array_equal(x, other[path], err_msg=str(path))
