"""Who runs a sweep: this machine, Slurm, or TPU slices."""

import argparse
import os
import pathlib
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanosam.run.metrics_file import METRICS_FILE
from nanosam.run.record import CONFIG_FILE
from nanosam.study import runs
from nanosam.study.sweep import Planned
from nanosam.system.errors import Interrupted, UsageError, UserError

LOG_FILE = "train.log"
# Outcomes of one sweep over a run, beside a run's own states.
SKIPPED, FAILED, INTERRUPTED, WAITING = "finished before", "failed", "interrupted", "not started"
QUEUED = "in the queue"
GOOD = (runs.FINISHED, SKIPPED, QUEUED)
LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
RECORDS = (CONFIG_FILE, METRICS_FILE, runs.SEQUENCES_FILE)  # what tells how a run ended

# What asks us to stop, and how the runs are told; SIGHUP is a terminal that closes.
STOPPING = {
  signal.SIGINT: signal.SIGINT,
  signal.SIGTERM: signal.SIGTERM,
  signal.SIGHUP: signal.SIGTERM,
}
Say = Callable[[str], None]


class Local:
  """Trains in processes of this machine, `jobs` at a time."""

  def __init__(self, jobs: int, say: Say):
    self._jobs, self._say = jobs, say
    self._active: dict[int, tuple[Planned, subprocess.Popen[bytes], float]] = {}  # by slot
    self._signals: list[signal.Signals] = []  # received
    self._passed = 0  # how many of them the runs have been sent

  def __call__(self, todo: Sequence[Planned]) -> dict[str, str]:
    """Trains every run; what became of each, by id."""
    outcomes = {run.id: WAITING for run in todo}
    waiting = list(todo)
    heard = [s for s in STOPPING if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {s: signal.signal(s, self._note) for s in heard}
    try:
      while self._active or (waiting and not self._signals):
        for slot in range(self._jobs):
          if slot not in self._active and waiting and not self._signals:
            self._start(slot, waiting.pop(0), f"{len(todo) - len(waiting)}/{len(todo)}")
        time.sleep(0.05)
        self._pass_on()
        for run, outcome in self._collect():
          if outcome == INTERRUPTED and not self._signals:
            waiting.insert(0, run)
          outcomes[run.id] = outcome
    finally:
      for s, handler in previous.items():
        signal.signal(s, handler)
    return outcomes

  def command(self, run: Planned) -> list[str]:
    return run.command

  def fetch(self, run: Planned) -> None:
    """Brings the records of a run that has ended to its workdir: here they are there already."""

  def _start(self, slot: int, run: Planned, number: str) -> None:
    run.workdir.mkdir(parents=True, exist_ok=True)
    with open(run.workdir / LOG_FILE, "ab") as log:
      process = subprocess.Popen(
        self.command(run),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **share_of_devices(slot, self._jobs, os.environ)},
        start_new_session=True,  # a terminal's ctrl-C reaches it through us alone, and once
      )
    self._say(f"[{number}] {run.id}: started")
    self._active[slot] = run, process, time.monotonic()

  def _collect(self) -> Iterator[tuple[Planned, str]]:
    for slot, (run, process, since) in list(self._active.items()):
      if process.poll() is None:
        continue
      del self._active[slot]
      self.fetch(run)
      outcome = outcome_of(run, process.returncode, stopped=bool(self._signals))
      seconds = time.monotonic() - since
      self._say(f"{run.id}: {outcome} after {seconds:.0f} s{_why(run, outcome)}")
      yield run, outcome

  def _note(self, number: int, _: Any) -> None:
    self._signals.append(signal.Signals(number))  # and no more: a run may be just about to start

  def _pass_on(self) -> None:
    for number in self._signals[self._passed :]:
      if not self._passed:
        self._say("stopping: the runs under way save first; ctrl-C again leaves at once")
      self._passed += 1
      for _, process, _ in self._active.values():
        process.send_signal(STOPPING[number])


class Tpu(Local):
  """Trains each run on a TPU slice of its own."""

  def __init__(self, jobs: int, say: Say):
    super().__init__(jobs, say)
    self._remote = os.environ.get("NANOSAM_REMOTE", "").rstrip("/")
    if "://" not in self._remote:
      raise UsageError("--backend=tpu: say where the workdirs go, NANOSAM_REMOTE=gs://BUCKET/DIR")

  def command(self, run: Planned) -> list[str]:
    name = "nanosam-" + re.sub("[^a-z0-9]+", "-", run.id.lower())[-40:].strip("-")
    workdir = f"{self._remote}/{run.id}"
    return ["bash", str(LAUNCH / "tpu_pod.sh"), "run", name, *run.arguments(workdir)]

  def fetch(self, run: Planned) -> None:
    files = [f"{self._remote}/{run.id}/{file}" for file in RECORDS]
    subprocess.run(["gcloud", "storage", "cp", *files, f"{run.workdir}/"], capture_output=True)


class Slurm:
  """Hands every run to the queue, which decides when, and how many at a time."""

  def __init__(self, jobs: int, say: Say):
    self._say = say

  def __call__(self, todo: Sequence[Planned]) -> dict[str, str]:
    queued = self._call("squeue", "--me", "--noheader", "--format=%j").split()
    for run in todo:
      if run.id not in queued:
        if (run.workdir / LOG_FILE).exists():  # it was submitted before
          self._say(f"{run.id}: {state(run)}{_why(run, state(run))}; submitted again")
        run.workdir.mkdir(parents=True, exist_ok=True)
        options = [f"--job-name={run.id}", f"--output={run.workdir / LOG_FILE}"]
        job = LAUNCH / "slurm.sbatch"
        self._say(self._call("sbatch", *options, str(job), *run.arguments(run.workdir)).strip())
    return {run.id: QUEUED for run in todo}

  def _call(self, *words: str) -> str:
    try:
      return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as e:
      raise UserError(
        f"there is no {words[0]} here: start the sweep where jobs are submitted"
      ) from e
    except subprocess.CalledProcessError as e:
      raise UserError(f"{words[0]}: {' '.join(e.stderr.split())}") from e


def share_of_devices(slot: int, jobs: int, environment: Any) -> dict[str, str]:
  devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
  if jobs == 1 or not devices:
    return {}
  if len(devices) < jobs:
    raise UsageError(f"CUDA_VISIBLE_DEVICES={','.join(devices)} are too few for {jobs} at a time")
  return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::jobs])}


def outcome_of(run: Planned, code: int, stopped: bool) -> str:
  stored = run.stored()
  if code == 0 and stored and stored.state == runs.FINISHED:
    return runs.FINISHED
  if stopped or code == Interrupted.exit_code:
    return INTERRUPTED
  return runs.DIVERGED if stored and stored.state == runs.DIVERGED else FAILED


def _why(run: Planned, outcome: str) -> str:
  if outcome == runs.FINISHED:
    return ""
  lines = (run.workdir / LOG_FILE).read_text(errors="replace").strip().splitlines()
  reason = next(
    (x for x in reversed(lines) if x.startswith("nanosam: ")), lines[-1] if lines else ""
  )
  return f": {reason.removeprefix('nanosam: ')} ({run.workdir / LOG_FILE})"


# A backend takes the runs to make and says what became of each.
BACKENDS: dict[str, Callable[[int, Say], Callable[[Sequence[Planned]], dict[str, str]]]] = {
  "local": Local,
  "slurm": Slurm,
  "tpu": Tpu,
}


def state(run: Planned) -> str:
  stored = run.stored()
  if stored is None:
    return WAITING
  return stored.state if stored.state == runs.FINISHED else f"{stored.state} at step {stored.step}"


def execute(
  planned: Sequence[Planned],
  backend: str,
  jobs: int,
  say: Say,
  done: Sequence[str] = (runs.FINISHED,),
) -> dict[str, str]:
  """Makes every run whose state is not among `done`; what became of each, by id."""
  stored = {run.id: run.stored() for run in planned}
  todo = [run for run in planned if not (s := stored[run.id]) or s.state not in done]
  outcomes = {run.id: SKIPPED for run in planned}
  if todo:
    say(f"{len(planned)} runs, {len(planned) - len(todo)} finished before")
    outcomes |= BACKENDS[backend](jobs, say)(todo)
  return outcomes


def check_outcomes(outcomes: dict[str, str], how_to_go_on: str) -> None:
  """Raises what the sweep's exit code should be."""
  values = list(outcomes.values())
  if INTERRUPTED in values or WAITING in values:
    done = sum(v in GOOD for v in values)
    raise Interrupted(
      f"stopped with {done} of {len(values)} runs finished; go on with: {how_to_go_on}"
    )
  if bad := [name for name, v in outcomes.items() if v not in GOOD]:
    raise UserError(
      f"{len(bad)} of {len(values)} runs are not finished ({', '.join(bad[:3])}"
      f"{', ...' if len(bad) > 3 else ''}); see their {LOG_FILE}; to try them again: {how_to_go_on}"
    )


def table(planned: Sequence[Planned], outcomes: dict[str, str]) -> str:
  width = max((len(run.id) for run in planned), default=0)
  lines = []
  for run in planned:
    stored = run.stored()
    loss = f"{stored.evals[-1]['eval/loss']:.4f}" if stored and stored.evals else ""
    lines.append(f"{run.id:<{width}}  {loss:>8}  {outcomes[run.id]}")
  return "\n".join(lines)


def print_plan(planned: Sequence[Planned]) -> None:
  for run in planned:
    print(f"# {run.id}  {run.tokens:.3g} tokens  {state(run)}\n{shlex.join(run.command)}")
  print(f"# {len(planned)} runs, {sum(run.tokens for run in planned):.3g} tokens")


def add_backend_arguments(p: argparse.ArgumentParser) -> None:
  p.add_argument("--backend", default="local", choices=BACKENDS)
  p.add_argument("--jobs", type=int, default=1, help="runs at a time")
  p.add_argument("--dry_run", action="store_true", help="say what would be run")
