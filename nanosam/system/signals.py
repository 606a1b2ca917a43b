"""Stopping on request: SIGTERM and ctrl-C save first, a second ctrl-C exits at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from nanosam.system.errors import Interrupted

_NOTHING_LOST = "stopped before the next step, nothing is lost; run the same command to continue"


class StopRequest:
  """True once the run was asked to stop.

  Python runs signal handlers only between bytecodes of the main thread, which may be compiling for
  minutes. The wakeup descriptor is written by the C handler itself, so a thread that reads it
  notices at once.
  """

  def __init__(self) -> None:
    self._asked = 0
    self._nothing_to_save = self._shared = False
    self.saved: Callable[[], bool] = lambda: True  # whether there is a checkpoint to resume from
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    self._previous = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    threading.Thread(target=self._listen, name="signals", daemon=True).start()

  def __bool__(self) -> bool:
    return self._asked > 0 and not self._shared

  @contextlib.contextmanager
  def nothing_to_save(self) -> Iterator[None]:
    """Inside, a request ends the process at once, as there is nothing to save."""
    self._nothing_to_save = True
    if self:
      raise Interrupted(_NOTHING_LOST)
    yield
    self._nothing_to_save = False

  def share(self) -> None:
    """Several processes must stop at the same step; JAX agrees on one when any gets a SIGTERM.

    JAX has its own handler for that signal by now, so all that is left is to turn ctrl-C into it.
    """
    self._shared = True

  def _listen(self) -> None:
    while byte := os.read(self._read, 1):
      if byte[0] not in (signal.SIGINT, signal.SIGTERM):
        continue
      self._asked += 1
      if self._nothing_to_save:
        _say(_NOTHING_LOST)
        os._exit(Interrupted.exit_code)
      if self._asked == 1:
        _say("stopping at the next step, after saving; ctrl-C again exits at once without saving")
        if self._shared:
          os.kill(os.getpid(), signal.SIGTERM)
      elif byte[0] == signal.SIGINT:
        if self.saved():
          _say("exited without saving; the same command resumes from the last checkpoint")
        else:
          _say("exited, and nothing is saved yet; the same command starts from the beginning")
        os._exit(130)

  def __enter__(self) -> "StopRequest":
    return self

  def __exit__(self, *_: object) -> None:
    signal.set_wakeup_fd(self._previous_fd)
    for s, handler in self._previous.items():
      signal.signal(s, handler)
    os.close(self._write)


def _say(text: str) -> None:
  print(f"\nnanosam: {text}", file=sys.stderr, flush=True)
