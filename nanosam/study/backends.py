"""Where the runs of a sweep are trained: this machine, Slurm, or TPU slices."""

import argparse
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nanosam.run import dry_run
from nanosam.run.metrics_file import METRICS_FILE
from nanosam.run.record import CONFIG_FILE
from nanosam.study import runs
from nanosam.study.sweeps import Job
from nanosam.system.errors import Interrupted, UsageError, UserError
from nanosam.system.progress import TimeLeft, duration

LOG_FILE = "train.log"
REPORT_EVERY = 60.0  # seconds
# What became of a job, besides the states of a run.
SKIPPED, FAILED, INTERRUPTED, WAITING = "finished before", "failed", "interrupted", "not started"
QUEUED = "in the queue"
LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
RECORDS = (CONFIG_FILE, METRICS_FILE, runs.SEQUENCES_FILE)  # these tell how a run ended

# Signals that ask us to stop, and what the runs get; SIGHUP is a terminal that closes.
STOPPING = {
  signal.SIGINT: signal.SIGINT,
  signal.SIGTERM: signal.SIGTERM,
  signal.SIGHUP: signal.SIGTERM,
}


class SignalRelay:
  """Collects the signals that ask this process to stop; true once there was one."""

  def __init__(self) -> None:
    self._received: list[signal.Signals] = []
    self._passed = 0  # how many of them pass_on() has sent

  def __enter__(self) -> "SignalRelay":
    heard = [s for s in STOPPING if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP
    self._previous = {s: signal.signal(s, self._note) for s in heard}
    return self

  def __exit__(self, *_: object) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)

  def _note(self, number: int, _: Any) -> None:
    self._received.append(signal.Signals(number))  # only that: a child may be about to start

  def __bool__(self) -> bool:
    return bool(self._received)

  def pass_on(self, children: Iterable[subprocess.Popen[Any]]) -> None:
    """Sends them what has come since the last call."""
    new = self._received[self._passed :]
    self._passed += len(new)
    for number in new:
      for child in children:
        child.send_signal(STOPPING[number])


def local(
  todo: Sequence[Job],
  parallel: int,
  command: Callable[[Job], list[str]] = lambda job: job.command,
  fetch: Callable[[Job], None] = lambda job: None,
) -> dict[str, str]:
  """Trains in processes of this machine, `parallel` at a time; what became of each, by id.

  The longest runs come first, so that no core is idle for long at the end. `fetch` brings the
  records of a run that has ended to its workdir.
  """
  outcomes = {job.id: WAITING for job in todo}
  waiting, announced, said = sorted(todo, key=lambda job: -job.cost), False, time.monotonic()
  active: dict[int, Active] = {}  # by slot
  with SignalRelay() as stop:
    while active or (waiting and not stop):
      for slot in range(parallel):
        if slot not in active and waiting and not stop:
          job = waiting.pop(0)
          process = _start(command(job), job, slot, parallel)
          active[slot] = Active(job, process, time.monotonic(), TimeLeft())
          say(f"[{len(todo) - len(waiting)}/{len(todo)}] {job.id}: started")
      time.sleep(0.05)
      if stop and not announced:
        announced = True
        say("stopping: the runs under way save first; ctrl-C again leaves at once")
      if (now := time.monotonic()) > said + REPORT_EVERY:
        said = now
        for run in active.values():
          say(f"  {run.job.id}: {run.progress(now)}")
      stop.pass_on([run.process for run in active.values()])
      for slot, (job, process, since, _) in list(active.items()):
        if process.poll() is not None:
          del active[slot]
          fetch(job)
          outcome = outcomes[job.id] = outcome_of(job, process.returncode, bool(stop))
          say(f"{job.id}: {outcome} after {time.monotonic() - since:.0f} s{_why(job, outcome)}")
          if outcome == INTERRUPTED and not stop:
            waiting.insert(0, job)
  return outcomes


class Active(NamedTuple):
  """A run under way."""

  job: Job
  process: subprocess.Popen[bytes]
  since: float
  left: TimeLeft

  def progress(self, now: float) -> str:
    stored, steps = self.job.stored(), self.job.config.opt.num_train_steps
    step = stored.step if stored else 0
    left = self.left.update(step, steps, now, counts=step > 0)
    return f"step {step} of {steps}, {duration(left)} left"


def _start(command: list[str], job: Job, slot: int, parallel: int) -> subprocess.Popen[bytes]:
  job.workdir.mkdir(parents=True, exist_ok=True)
  with open(job.workdir / LOG_FILE, "ab") as log:
    return subprocess.Popen(
      [*_settled(slot, parallel), *command],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      env={**os.environ, **share_of_devices(slot, parallel, os.environ)},
      start_new_session=True,  # a terminal's ctrl-C reaches it only through us, once
    )


# Becomes the command, which then keeps to its cores, and saves and stops when the sweep is killed:
# 1 is Linux's PR_SET_PDEATHSIG. (Not in preexec_fn: it would fork a process that has threads.)
_SETTLE = """
import ctypes, os, signal, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _settled(slot: int, parallel: int) -> list[str]:
  if sys.platform != "linux":
    return []
  cores = share_of_cores(slot, parallel, os.sched_getaffinity(0))
  return [sys.executable, "-c", _SETTLE, ",".join(map(str, cores))]


def tpu(todo: Sequence[Job], parallel: int) -> dict[str, str]:
  """Trains each run on a TPU slice of its own."""
  remote = os.environ.get("NANOSAM_REMOTE", "").rstrip("/")
  if "://" not in remote:
    raise UsageError("--backend=tpu: set NANOSAM_REMOTE=gs://BUCKET/DIR, the workdirs' folder")

  def command(job: Job) -> list[str]:
    name = "nanosam-" + re.sub("[^a-z0-9]+", "-", job.id.lower())[-40:].strip("-")
    script = str(LAUNCH / "tpu_pod.sh")
    return ["bash", script, "run", name, *job.arguments(f"{remote}/{job.id}")]

  def fetch(job: Job) -> None:
    files = [f"{remote}/{job.id}/{file}" for file in RECORDS]
    subprocess.run(["gcloud", "storage", "cp", *files, f"{job.workdir}/"], capture_output=True)

  return local(todo, parallel, command, fetch)


def slurm(todo: Sequence[Job], parallel: int) -> dict[str, str]:
  """Submits every run to the queue, which decides when, and how many at a time."""

  def call(*words: str) -> str:
    try:
      return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as e:
      raise UserError(f"no {words[0]} here: start the sweep where jobs are submitted") from e
    except subprocess.CalledProcessError as e:
      raise UserError(f"{words[0]}: {' '.join(e.stderr.split())}") from e

  queued = call("squeue", "--me", "--noheader", "--format=%j").split()
  for job in todo:
    if job.id not in queued:
      if (job.workdir / LOG_FILE).exists():  # it was submitted before
        say(f"{job.id}: {state(job)}{_why(job, state(job))}; submitted again")
      job.workdir.mkdir(parents=True, exist_ok=True)
      options = [f"--job-name={job.id}", f"--output={job.workdir / LOG_FILE}"]
      script = str(LAUNCH / "slurm.sbatch")
      say(call("sbatch", *options, script, *job.arguments(job.workdir)).strip())
  return {job.id: QUEUED for job in todo}


# A backend takes the jobs to run and returns what became of each.
BACKENDS = {"local": local, "slurm": slurm, "tpu": tpu}


def share_of_devices(slot: int, parallel: int, environment: Mapping[str, str]) -> dict[str, str]:
  devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
  if parallel == 1 or not devices:
    return {}
  if len(devices) < parallel:
    raise UsageError(
      f"CUDA_VISIBLE_DEVICES={','.join(devices)} are too few for {parallel} at a time"
    )
  return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::parallel])}


def share_of_cores(slot: int, parallel: int, cores: Iterable[int]) -> list[int]:
  """Neighbours; all of them if there are fewer than jobs."""
  cores = sorted(cores)
  if len(cores) < parallel:
    return cores
  return cores[slot * len(cores) // parallel : (slot + 1) * len(cores) // parallel]


def outcome_of(job: Job, code: int, stopped: bool) -> str:
  stored = job.stored()
  if code == 0 and stored and stored.state == runs.FINISHED:
    return runs.FINISHED
  if stopped or code == Interrupted.exit_code:
    return INTERRUPTED
  return runs.DIVERGED if stored and stored.state == runs.DIVERGED else FAILED


def _why(job: Job, outcome: str) -> str:
  if outcome == runs.FINISHED:
    return ""
  lines = (job.workdir / LOG_FILE).read_text(errors="replace").strip().splitlines()
  errors = [line for line in lines if line.startswith("nanosam: ")]
  reason = (errors or lines or [""])[-1]
  return f": {reason.removeprefix('nanosam: ')} ({job.workdir / LOG_FILE})"


def state(job: Job) -> str:
  stored = job.stored()
  if stored is None:
    return WAITING
  return stored.state if stored.state == runs.FINISHED else f"{stored.state} at step {stored.step}"


def missing(jobs: Sequence[Job], done: Sequence[str]) -> list[Job]:
  """Those whose run is not in one of the states `done`."""
  return [job for job in jobs if not (run := job.stored()) or run.state not in done]


def execute(
  jobs: Sequence[Job],
  backend: str,
  parallel: int,
  argv: Sequence[str],
  done: Sequence[str] = (runs.FINISHED,),
) -> bool:
  """Trains what is missing and says what became of all; whether they have ended, or are queued.

  Raises what the exit code of the command `argv` should be, which resumes the sweep.
  """
  todo = missing(jobs, done)
  outcomes = {job.id: SKIPPED for job in jobs}
  if todo:
    for job in todo:
      dry_run.check(job.config)  # before anything is queued or rented
    say(f"{len(jobs)} runs, {len(jobs) - len(todo)} finished before")
    outcomes |= BACKENDS[backend](todo, parallel)
  width = max((len(job.id) for job in jobs), default=0)
  for job in jobs:
    stored = job.stored()
    loss = f"{stored.evals[-1]['eval/loss']:.4f}" if stored and stored.evals else ""
    say(f"{job.id:<{width}}  {loss:>8}  {outcomes[job.id]}")
  command, values = shlex.join(["python", *argv]), list(outcomes.values())
  bad = [name for name, v in outcomes.items() if v not in (*done, SKIPPED, QUEUED)]
  if INTERRUPTED in values or WAITING in values:
    finished = f"{len(jobs) - len(bad)} of {len(jobs)}"
    raise Interrupted(f"stopped with {finished} runs finished; resume with: {command}")
  if bad:
    raise UserError(
      f"{len(bad)} of {len(jobs)} runs are not finished ({', '.join(bad[:3])}"
      f"{', ...' if len(bad) > 3 else ''}); see their {LOG_FILE}; to try them again: {command}"
    )
  return QUEUED not in values


def say(line: str) -> None:
  print(line, flush=True)


def add_backend_arguments(p: argparse.ArgumentParser) -> None:
  p.add_argument("--backend", default="local", choices=BACKENDS)
  p.add_argument("--jobs", type=int, default=1, help="runs at a time")
  p.add_argument("--dry_run", action="store_true", help="only print what would be run")
