"""Runs one command as several processes of this machine, joined over loopback.

python launch/local.py --processes=2 -- python -m nanosam.train --config=configs/quickstart.py ...

Each process finds NANOSAM_COORDINATOR, NANOSAM_NUM_PROCESSES and NANOSAM_PROCESS_ID in its
environment, and its share of CUDA_VISIBLE_DEVICES if that is set. Its lines are printed with its
number in front.

ctrl-C (or SIGTERM, or a terminal that closes) is passed on to all: they save and stop. When one
dies the others are ended. When they stop after saving though nobody asked us (exit 75: a machine
that is about to go), they are started again. The exit code is that of the first to fail.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from nanosam.study.backends import STOPPING, share_of_devices
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import Interrupted, UsageError

GRACE_SECONDS = 30.0  # between the first failure and the end of those who do not follow


class Group:
  """The processes of one attempt."""

  def __init__(self, command: list[str], size: int):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{s.getsockname()[1]}"
    self._processes = [self._start(command, i, size, address) for i in range(size)]
    self._readers = [
      threading.Thread(target=_copy, args=(process.stdout, f"[{i}] "))
      for i, process in enumerate(self._processes)
    ]
    for reader in self._readers:
      reader.start()

  def _start(self, command: list[str], i: int, size: int, address: str) -> subprocess.Popen[str]:
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
        start_new_session=True,  # a terminal's ctrl-C reaches it through us alone, and once
      )
    except OSError as e:
      raise UsageError(f"cannot run {command[0]}: {e.strerror or e}") from e

  def send(self, number: int) -> None:
    for process in self._processes:
      if process.poll() is None:
        process.send_signal(number)

  def failure(self) -> int:
    """The exit code of one that failed; 0 if none has."""
    codes = [process.poll() for process in self._processes]
    bad = [code if code > 0 else 128 - code for code in codes if code]
    # What broke first shows in the others as a stop or a kill.
    return min(bad, key=lambda code: (code == Interrupted.exit_code, code > 128), default=0)

  def running(self) -> bool:
    return any(process.poll() is None for process in self._processes)

  def close(self) -> None:
    self.send(signal.SIGKILL)
    for process in self._processes:
      process.wait()
    for reader in self._readers:
      reader.join()


def _copy(lines: IO[str] | None, prefix: str) -> None:
  for line in lines or ():
    sys.stdout.write(f"{prefix}{line}")  # one write: lines of several processes do not mix
    sys.stdout.flush()


def attempt(command: list[str], size: int, heard: list[signal.Signals]) -> int:
  """Runs all processes to their end; their exit code."""
  group, passed, deadline = Group(command, size), 0, None
  try:
    while group.running() and (deadline is None or time.monotonic() < deadline):
      for number in heard[passed:]:
        passed += 1
        group.send(STOPPING[number])
      if deadline is None and (code := group.failure()):
        deadline = time.monotonic() + GRACE_SECONDS
        if code != Interrupted.exit_code:  # those stop together, and may still be saving
          group.send(signal.SIGTERM)
      time.sleep(0.05)
    return group.failure()
  finally:
    group.close()


def main(argv: list[str]) -> None:
  p = Parser("python launch/local.py", __doc__)
  p.add_argument("--processes", type=int, required=True)
  words = argv[1:]
  split = words.index("--") if "--" in words else len(words)
  args, command = p.parse_args(words[:split]), words[split + 1 :]
  if not command or args.processes < 1:
    raise UsageError("say --processes=N, at least 1, and after -- the command to run")
  heard: list[signal.Signals] = []

  def note(number: int, _: Any) -> None:
    heard.append(signal.Signals(number))  # and no more: a process may be just about to start

  for number in STOPPING:
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
      signal.signal(number, note)
  while (code := attempt(command, args.processes, heard)) == Interrupted.exit_code and not heard:
    print("stopped after saving; starting again", flush=True)
  sys.exit(code)


if __name__ == "__main__":
  errors.run(main)
