"""The line that shows how far a run is."""

import io
import itertools

import pytest

from nanosam.system import progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def screen(text):
  """What a terminal shows: carriage return goes to the line's start, ESC[K clears the rest."""
  rows = [""]
  column = 0
  i = 0
  while i < len(text):
    if text.startswith("\x1b[K", i):
      rows[-1] = rows[-1][:column]
      i += 3
      continue
    if text[i] == "\r":
      column = 0
    elif text[i] == "\n":
      rows.append("")
      column = 0
    else:
      rows[-1] = rows[-1][:column] + text[i] + rows[-1][column + 1 :]
      column += 1
    i += 1
  return rows


def test_terminal_line_updates_in_place_and_notes_stay(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  stream, clock = Terminal(), Clock()
  p = progress.Progress(100, stream, clock=clock)
  p.update(1, loss=10.0, tokens_per_sec=1234567.0)
  p.note("eval loss 3.0")
  clock.now += 1
  p.update(2, loss=9.5, tokens_per_sec=12345.0)
  assert screen(stream.getvalue()) == [
    "eval loss 3.0",
    "step 2/100  loss 9.5000  12.3k tokens/s  1m38s left",
  ]
  p.note("x")
  p.close()
  shown = screen(stream.getvalue())
  assert shown[:2] == ["eval loss 3.0", "x"] and shown[2].startswith("step 2/100")
  assert shown[3:] == [""]


def test_terminal_line_never_wraps(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  stream = Terminal()
  p = progress.Progress(10**30, stream, clock=Clock())
  p.update(10**29, loss=1e30, tokens_per_sec=1.0)
  assert len(screen(stream.getvalue())[0]) == 79


def test_plain_lines_are_few_with_the_first_and_the_last():
  stream, clock = io.StringIO(), Clock()
  p = progress.Progress(1000, stream, every_seconds=10.0, clock=clock)
  for step in range(1, 996):
    p.update(step, loss=1.0, tokens_per_sec=5.0)
    clock.now += 0.1
  p.note("stopping")
  p.close()
  lines = stream.getvalue().splitlines()
  steps = [int(line.split()[1].split("/")[0]) for line in lines if line != "stopping"]
  assert steps[0] == 1 and steps[-1] == 995 and 9 <= len(steps) <= 12
  assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_last_step_is_shown_once():
  stream = io.StringIO()
  p = progress.Progress(2, stream, clock=Clock())
  p.update(1, loss=1.0, tokens_per_sec=5.0)
  p.update(2, loss=1.0, tokens_per_sec=5.0)
  p.close()
  assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/2", "2/2"]


def test_time_left_counts_pauses_but_does_not_jump():
  left = progress.TimeLeft()
  now, estimates = 0.0, []
  for step in range(1, 2001):
    now += 0.1
    if step % 100 == 0:
      now += 5.0  # eval
    estimates.append(left.update(step, 10_000, now))
  true = 8000 * 0.1 + 80 * 5.0
  assert estimates[-1] == pytest.approx(true, rel=0.1)
  late = estimates[1000:]
  assert max(b / a for a, b in itertools.pairwise(late)) < 1.15


def test_progress_survives_a_closed_stream():
  stream = io.StringIO()
  p = progress.Progress(2, stream)
  stream.close()
  p.update(1, loss=1.0, tokens_per_sec=5.0)
  p.note("x")
  p.close()
