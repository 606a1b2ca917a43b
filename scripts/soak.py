"""Kills a training run at random moments and compares its result with an undisturbed run.

python scripts/soak.py [--kills=20] [--seed=0] [--out=DIR] [--config=FILE] [--config.KEY=VALUE ...]

Half of the kills come while a checkpoint is being written, a quarter before the first step (while
importing, restoring, compiling), a quarter at any other time. Exit 0: the final state and all
losses are identical, bit for bit. Exit 1: it prints what differs, or which run failed.
"""

import argparse
import collections
import contextlib
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanosam import config as config_lib
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
STEPS_PER_KILL = 30
SETTINGS = {  # a run that spends most of its time on what may go wrong
  "model.D": 32,
  "model.L": 32,
  "model.N": 1,
  "batch_size": 8,
  "opt.warmup_steps": 10,
  "data.vocab_size": 512,
  "eval_every_steps": 30,
  "eval_steps": 2,
  "checkpoint_every_steps": 15,
  "log_every_steps": 1,
  "wandb.mode": "disabled",
}
Process = subprocess.Popen[bytes]


def main(argv: list[str]) -> None:
  args, overrides = arguments(argv[1:])
  folder = pathlib.Path(args.out or tempfile.mkdtemp(prefix="nanosam-soak-"))
  whole, killed = folder / "whole", folder / "killed"
  for workdir in (whole, killed):
    shutil.rmtree(workdir, ignore_errors=True)
  folder.mkdir(parents=True, exist_ok=True)
  settings = {"opt.num_train_steps": STEPS_PER_KILL * args.kills, **SETTINGS}
  command = [
    *(sys.executable, "-m", "nanosam.train", f"--config={args.config}"),
    *(f"--config.{key}={value}" for key, value in settings.items()),
    *overrides,
  ]
  print(f"an undisturbed run in {whole} ...", flush=True)
  seconds = train(command, whole)
  kill(command, killed, args.kills, random.Random(args.seed), seconds)
  train(command, killed)
  if differences := compare(whole, killed):
    raise UserError("; ".join(differences))
  print("identical: parameters, optimizer state, every train and eval loss")


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = Parser("scripts/soak.py", __doc__)
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0, help="of the random moments")
  parser.add_argument("--out", help="folder of the two workdirs (default: a temporary one)")
  parser.add_argument("--config", default="configs/quickstart.py")
  args, overrides = parser.parse_known_args(argv)
  config_lib.from_command_line(["train", f"--config={args.config}", *overrides])  # checks them
  return args, overrides


def start(command: list[str], workdir: pathlib.Path) -> Process:
  with open(workdir.with_suffix(".log"), "ab") as log:
    return subprocess.Popen(
      [*command, f"--config.workdir={workdir}"], cwd=ROOT, stdout=log, stderr=log
    )


def train(command: list[str], workdir: pathlib.Path) -> float:
  """Trains to the end; returns how many seconds STEPS_PER_KILL steps took."""
  process = start(command, workdir)
  wait_for_step(process, workdir)
  begin = time.monotonic()
  if process.wait():
    fail(process, workdir)
  last = read_metrics(workdir / METRICS_FILE)[-1]["step"]
  return (time.monotonic() - begin) / last * STEPS_PER_KILL


def fail(process: Process, workdir: pathlib.Path) -> None:
  log = workdir.with_suffix(".log")
  raise UserError(f"exit code {process.returncode}, see {log}:\n{log.read_text()[-1000:]}")


def kill(
  command: list[str], workdir: pathlib.Path, kills: int, rng: random.Random, seconds: float
) -> None:
  counts: collections.Counter[str] = collections.Counter()
  for number in range(1, kills + 1):
    begin, process = time.time(), start(command, workdir)
    moment = rng.choice(["while saving", "while saving", "before a step", "at any time"])
    if moment == "before a step":
      wait_for_step(process, workdir, at_most=rng.uniform(0, 5))
    elif moment == "at any time":
      wait_for_step(process, workdir)
      wait(process, rng.uniform(0, seconds))
    else:
      wait_for_saving(process, workdir, rng)
    process.kill()
    if process.wait() == 0:
      raise UserError(f"the run ended after {number - 1} kills: raise --config.opt.num_train_steps")
    if process.returncode > 0:
      fail(process, workdir)
    half = half_written(workdir, begin)
    counts["that left a half-written checkpoint" if half else "others"] += 1
    print(f"kill {number:3d} {moment:14s} checkpoints {steps(workdir)} {[*half]}", flush=True)
  print(f"{kills} kills: {dict(counts)}; training to the end ...", flush=True)


def wait(process: Process, seconds: float) -> None:
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(seconds)


def wait_for_step(process: Process, workdir: pathlib.Path, at_most: float = 1e9) -> None:
  """Until this process has written a record."""
  begin, end, file = time.time(), time.monotonic() + at_most, workdir / METRICS_FILE
  while process.poll() is None and time.monotonic() < end:
    if file.exists() and file.stat().st_size and file.stat().st_mtime > begin:
      return
    time.sleep(0.005)


def wait_for_saving(process: Process, workdir: pathlib.Path, rng: random.Random) -> None:
  """Until this process is writing a checkpoint: some time between its first and last byte."""
  begin, saves, wanted = time.time(), set[str](), rng.randint(1, 3)
  while process.poll() is None and len(saves) < wanted:
    saves |= half_written(workdir, begin)
    time.sleep(0.001)
  time.sleep(rng.uniform(0, 0.05))


def half_written(workdir: pathlib.Path, since: float) -> set[str]:
  """Unfinished checkpoints, except those left by an earlier process."""
  found = set()
  for path in workdir.glob("checkpoints/*tmp*"):
    with contextlib.suppress(FileNotFoundError):  # finished just now
      if path.stat().st_mtime > since:
        found.add(path.name)
  return found


def steps(workdir: pathlib.Path) -> list[int]:
  return sorted(int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdigit())


def compare(whole: pathlib.Path, killed: pathlib.Path) -> list[str]:
  """What differs, a line each."""
  differences = []
  expected, found = losses(whole), losses(killed)
  if expected != found:
    wrong = [pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]]
    differences.append(
      f"{len(found)} losses on record instead of {len(expected)}; first difference: {wrong[:1]}"
    )
  one, other = (arrays(w, steps(w)[-1]) for w in (whole, killed))
  for path in sorted(one.keys() | other.keys()):
    if path not in one or path not in other:
      differences.append(f"{path}: only in one of the two final checkpoints")
    elif not np.array_equal(one[path], other[path], equal_nan=True):
      gap = np.max(np.abs(one[path].astype(float) - other[path].astype(float)))
      differences.append(f"{path}: differs by up to {gap}")
  return differences


def losses(workdir: pathlib.Path) -> list[tuple[int, str, float]]:
  names = ("train/loss", "eval/loss", "eval/loss_sem", "eval/bits_per_byte")
  records = read_metrics(workdir / METRICS_FILE)
  return [(r["step"], name, r[name]) for r in records for name in names if name in r]


def arrays(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about unknown shardings
    tree = ocp.PyTreeCheckpointer().restore(workdir / "checkpoints" / str(step) / "state")
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


if __name__ == "__main__":
  errors.run(main)
