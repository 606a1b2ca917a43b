"""A run of two processes over loopback."""

import os
import random
import signal
import socket

import numpy as np
import pytest

from helpers.training import CONFIG, Outcome, losses, state


def free_port() -> int:
  """Below the ports that the system gives to whoever asks for any."""
  while True:
    port = random.SystemRandom().randrange(12_000, 30_000)
    with socket.socket() as s:
      try:
        s.bind(("127.0.0.1", port))
        return port
      except OSError:
        continue


class Pair:
  """Two processes of one run."""

  def __init__(self, commands, workdir, faults=("", ""), devices=4, **overrides):
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config={CONFIG}", f"--config.workdir={workdir}"]
    words += [f"--config.cluster.coordinator={address}", "--config.cluster.num_processes=2"]
    words += [f"--config.{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    self.processes = [
      commands.start(
        "train", *words, f"--config.cluster.process_id={i}", devices=devices, fault=fault
      )
      for i, fault in enumerate(faults)
    ]

  def wait(self, timeout: float = 600) -> list[Outcome]:
    outcomes = []
    try:
      for process in self.processes:
        out, err = process.communicate(timeout=timeout)
        outcomes.append(Outcome(process.returncode, out, err))
    finally:
      for process in self.processes:
        if process.poll() is None:
          os.killpg(process.pid, signal.SIGKILL)
    return outcomes


def finish(commands, workdir, **overrides) -> list[Outcome]:
  outcomes = Pair(commands, workdir, **overrides).wait()
  assert [o.code for o in outcomes] == [0, 0], "\n".join(o.err for o in outcomes)
  return outcomes


def assert_close(a, b) -> None:
  """The same records, and the same final state but for the order of sums."""
  for one, other in zip(losses(a), losses(b), strict=True):
    assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], rel=1e-4)
  x, y = state(a, 16), state(b, 16)
  assert x.keys() == y.keys()
  for path in x:
    np.testing.assert_allclose(x[path], y[path], rtol=5e-3, atol=1e-4, err_msg=str(path))
