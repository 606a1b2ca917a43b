"""Runs one command as several processes of this machine, joined over loopback.

python launch/local.py --processes=2 -- python -m nanosam.train --config=configs/quickstart.py ...

Each process finds NANOSAM_COORDINATOR, NANOSAM_NUM_PROCESSES and NANOSAM_PROCESS_ID in its
environment, and its share of CUDA_VISIBLE_DEVICES if that is set. Its lines are printed with its
number in front.

ctrl-C (or SIGTERM, or closing the terminal) is passed on to all: they save and stop. When one dies,
the others are ended. When they save and stop without having been asked (exit 75: a machine about to
be taken away), they are started again. The exit code is that of the first to fail.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time

from nanosam.study.backends import SignalRelay, share_of_devices
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import Interrupted, UsageError

GRACE_SECONDS = 30.0  # from the first failure until those that still run are killed


Process = subprocess.Popen[str]


def start(command: list[str], i: int, size: int, address: str) -> Process:
  cluster = {
    "NANOSAM_COORDINATOR": address,
    "NANOSAM_NUM_PROCESSES": str(size),
    "NANOSAM_PROCESS_ID": str(i),
  }
  try:
    return subprocess.Popen(
      command,
      env={**os.environ, **share_of_devices(i, size, os.environ), **cluster},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      start_new_session=True,  # a terminal's ctrl-C reaches it only through us, once
    )
  except OSError as e:
    raise UsageError(f"cannot run {command[0]}: {e.strerror or e}") from e


def copy_output(process: Process, prefix: str) -> None:
  for line in process.stdout or ():
    sys.stdout.write(f"{prefix}{line}")  # one write: lines of several processes do not mix
    sys.stdout.flush()


def failure(processes: list[Process]) -> int:
  """The exit code of one that failed; 0 if none has."""
  codes = [process.poll() for process in processes]
  bad = [code if code > 0 else 128 - code for code in codes if code]
  # The others were stopped or killed because of the first: report its code.
  return min(bad, key=lambda code: (code == Interrupted.exit_code, code > 128), default=0)


def attempt(command: list[str], size: int, stop: SignalRelay) -> int:
  """Runs all processes to their end; their exit code."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  processes = [start(command, i, size, address) for i in range(size)]
  readers = [
    threading.Thread(target=copy_output, args=(process, f"[{i}] "))
    for i, process in enumerate(processes)
  ]
  for reader in readers:
    reader.start()
  deadline = math.inf
  try:
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
      stop.pass_on(processes)
      if deadline == math.inf and (code := failure(processes)):
        deadline = time.monotonic() + GRACE_SECONDS
        if code != Interrupted.exit_code:  # those stop together, and may still be saving
          for process in processes:
            process.terminate()
      time.sleep(0.05)
    return failure(processes)
  finally:
    for process in processes:
      process.kill()
      process.wait()
    for reader in readers:
      reader.join()


def main(argv: list[str]) -> None:
  p = Parser("python launch/local.py", __doc__)
  p.add_argument("--processes", type=int, required=True)
  words = argv[1:]
  split = words.index("--") if "--" in words else len(words)
  args, command = p.parse_args(words[:split]), words[split + 1 :]
  if not command or args.processes < 1:
    raise UsageError("give --processes=N, at least 1, and the command to run after --")
  with SignalRelay() as stop:
    while (code := attempt(command, args.processes, stop)) == Interrupted.exit_code and not stop:
      print("stopped after saving; starting again", flush=True)
  sys.exit(code)


if __name__ == "__main__":
  errors.run(main)
