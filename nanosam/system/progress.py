"""The line a person watches: step, loss, speed, time left."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
  """One line that updates itself on a terminal; elsewhere a plain line now and then.

  All methods may be called from any thread. Trouble with the stream never reaches the caller.
  """

  def __init__(
    self,
    total_steps: int,
    stream: TextIO | None = None,
    *,
    every_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._total = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._clock = clock
    self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
    self._pause = 0.1 if self._live else every_seconds  # between two prints
    self._left = _TimeLeft(total_steps)
    self._line = ""
    self._shown = ""
    self._shown_at = float("-inf")
    self._lock = threading.Lock()

  def update(self, step: int, *, loss: float, tokens_per_sec: float) -> None:
    with self._lock:
      left = self._left.update(step, self._clock())
      line = (
        f"step {step}/{self._total}  loss {loss:.4f}  "
        f"{_short(tokens_per_sec)} tokens/s  {duration(left)} left"
      )
      self._set(line, last=step >= self._total)

  def status(self, line: str) -> None:
    """Any other line to watch."""
    with self._lock:
      self._set(line, last=False)

  def note(self, text: str) -> None:
    """A full line that stays, above the moving one."""
    with self._lock:
      if self._live:
        self._print(f"\r\x1b[K{text}\n{self._fit(self._shown)}")
      else:
        self._print(f"{text}\n")

  def close(self) -> None:
    """Shows the last state and ends the line."""
    with self._lock:
      if self._line != self._shown:
        self._show(self._clock())
      if self._live and self._shown:
        self._print("\n")
      self._line = self._shown = ""

  def _set(self, line: str, last: bool) -> None:
    self._line, now = line, self._clock()
    if last or now - self._shown_at >= self._pause:
      self._show(now)

  def _show(self, now: float) -> None:
    self._shown, self._shown_at = self._line, now
    self._print(f"\r{self._fit(self._line)}\x1b[K" if self._live else f"{self._line}\n")

  def _fit(self, line: str) -> str:
    """A line that wraps could not be overwritten."""
    columns = 80
    with contextlib.suppress(OSError, ValueError, AttributeError):
      columns = os.get_terminal_size(self._stream.fileno()).columns or columns
    return line[: columns - 1]

  def _print(self, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed pipe, full disk, closed file
      self._stream.write(text)
      self._stream.flush()


class _TimeLeft:
  """Time left = steps left x (smoothed time of a step + mean time per step of everything else).

  Pauses (eval, checkpoints) would make a smoothed step time jump. So what exceeds three step times
  is booked as a pause, and pauses are spread over all steps so far.
  """

  def __init__(self, total_steps: int):
    self._total = total_steps
    self._first_step = self._step = -1
    self._time = self._paused = self._step_time = 0.0

  def update(self, step: int, now: float) -> float | None:
    """Seconds left, or None as long as there is nothing to go by."""
    steps, elapsed = step - self._step, now - self._time
    is_first = self._first_step < 0
    self._step, self._time = step, now
    if is_first:
      self._first_step = step
    elif steps > 0:
      self._book(steps, elapsed)
    done = step - self._first_step
    if done <= 0:
      return None
    return max(0, self._total - step) * (self._step_time + self._paused / done)

  def _book(self, steps: int, elapsed: float) -> None:
    if self._step_time == 0.0:
      self._step_time = elapsed / steps
      return
    running = min(elapsed, 3 * self._step_time * steps)
    self._paused += elapsed - running
    weight = 1 - 0.95**steps
    self._step_time += weight * (running / steps - self._step_time)


def _short(x: float) -> str:
  for unit in ("", "k", "M"):
    if abs(x) < 999.5:
      return f"{x:.3g}{unit}"
    x /= 1000
  return f"{x:.3g}G"


def duration(seconds: float | None) -> str:
  if seconds is None:
    return "?"
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  days, h = divmod(hours, 24)
  if days:
    return f"{days}d{h:02}h"
  if hours:
    return f"{hours}h{m:02}m"
  return f"{m}m{s:02}s" if m else f"{s}s"
