"""The progress line: step, loss, speed, time left."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
  """One line that updates in place on a terminal; elsewhere a plain line every now and then.

  All methods are thread-safe. Errors of the stream never reach the caller.
  """

  def __init__(
    self,
    total_steps: int,
    stream: TextIO | None = None,
    *,
    unit: str = "tokens",
    every_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._total, self._unit = total_steps, unit
    self._stream = sys.stderr if stream is None else stream
    self._clock = clock
    self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
    self._interval = 0.1 if self._live else every_seconds  # between two prints
    self._time_left = TimeLeft()
    self._line = ""
    self._shown = ""
    self._shown_at = float("-inf")
    self._lock = threading.Lock()

  def update(self, step: int, *, loss: float, tokens_per_sec: float) -> None:
    line = f"step {step}/{self._total}  loss {loss:.4f}  {_short(tokens_per_sec)} {self._unit}/s"
    self.work(line, step, self._total, now=step >= self._total)

  def work(
    self, line: str, done: float, needed: float, *, counts: bool = True, now: bool = False
  ) -> None:
    """Any other line, and the time left until all `needed` work is done; `now` shows it at once.

    counts=False leaves the time since the last update out of the mean speed.
    """
    with self._lock:
      time_now = self._clock()
      left = self._time_left.update(done, needed, time_now, counts=counts)
      self._offer(f"{line}  {duration(left)} left", time_now, now)

  def show(self, line: str) -> None:
    """Any other line, where nobody knows how much work there is."""
    with self._lock:
      self._offer(line, self._clock())

  def _offer(self, line: str, time_now: float, now: bool = False) -> None:
    self._line = line
    if now or time_now - self._shown_at >= self._interval:
      self._show(time_now)

  def note(self, text: str) -> None:
    """Prints a line that stays, above the one that updates."""
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


class TimeLeft:
  """Estimates the time left from the mean speed so far."""

  def __init__(self) -> None:
    self._done = self._work = self._seconds = 0.0
    self._time: float | None = None

  def update(self, done: float, needed: float, now: float, *, counts: bool = True) -> float | None:
    """Seconds until all `needed` work is done; None while the speed is unknown."""
    if counts and self._time is not None:
      self._work += done - self._done
      self._seconds += now - self._time
    self._done, self._time = done, now
    return max(0.0, needed - done) * self._seconds / self._work if self._work > 0 else None


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
