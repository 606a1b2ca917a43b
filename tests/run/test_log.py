"""Writers: TensorBoard's curves after rollbacks, and that no logger can hold up a run."""

import math
import os
import sys
import threading
import time

import pytest
from helpers.writers import open_all, run_script

from nanosam.run import log, metrics_file
from nanosam.system.errors import UsageError


def test_unknown_wandb_mode_is_a_usage_error(tmp_path):
  with pytest.raises(UsageError, match="auto, online, offline, disabled"):
    open_all(tmp_path, wandb="on")


# TensorBoard.


def curve(workdir, tag):
  event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
  accumulator = event_accumulator.EventAccumulator(str(workdir))
  accumulator.Reload()
  return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def test_tensorboard_shows_one_curve_after_rollbacks(tmp_path):
  for session, (resume, last) in enumerate([(None, 8), (5, 9), (5, 300)]):
    w = open_all(tmp_path, tensorboard=True, resume_step=resume)
    for step in range((resume or 0) + 1, last + 1):
      w.write(step, {"train/loss": step + session / 4, "note": "text"})
    w.close()
    if session == 0:  # as after kill -9
      (events,) = tmp_path.glob("events.*")
      os.truncate(events, events.stat().st_size - 3)
  expected = [(s, float(s)) for s in range(1, 6)] + [(s, s + 0.5) for s in range(6, 301)]
  assert curve(tmp_path, "train/loss") == expected
  assert "tensorflow" not in sys.modules


def test_tensorboard_restart_from_nothing_replaces_all(tmp_path):
  for value in (1.0, 2.0):
    w = open_all(tmp_path, tensorboard=True)
    w.write(0, {"eval/loss": value})
    w.close()
  assert curve(tmp_path, "eval/loss") == [(0, 2.0)]


def test_tensorboard_takes_any_float(tmp_path):
  values = {"a": math.nan, "b": -math.inf, "c": 1e300, "d": -1e300, "e": 10**20}
  w = log.TensorBoardWriter(tmp_path, first_step=0)
  w.write(2**40, values)
  w.close()
  read = {k: curve(tmp_path, k)[0] for k in values}
  assert all(step == 2**40 for step, _ in read.values())
  assert math.isnan(read["a"][1])
  assert [read[k][1] for k in "bcd"] == [-math.inf, math.inf, -math.inf]
  assert read["e"][1] == pytest.approx(1e20)


def test_tensorboard_records_are_on_disk_at_once_and_by_no_thread(tmp_path):
  threads = threading.active_count()
  w = log.TensorBoardWriter(tmp_path, first_step=0)
  w.write(1, {"train/loss": 2.0})
  assert curve(tmp_path, "train/loss") == [(1, 2.0)]  # as after kill -9
  assert threading.active_count() == threads
  w.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_tensorboard_on_a_full_disk_is_switched_off_with_one_line(tmp_path, monkeypatch):
  monkeypatch.setattr(log, "_new_events_file", lambda folder: "/dev/full")
  said = []
  w = open_all(tmp_path, tensorboard=True, say=said.append)
  for step in range(50):
    w.write(step, {"x": 1.0})
  w.close()
  assert len(said) == 1 and "TensorBoard logging is off" in said[0] and "No space left" in said[0]
  assert len(metrics_file.read_metrics(tmp_path / "metrics.jsonl")) == 50


# Writers in the background.


class Hangs:
  def __init__(self, where):
    self._where = where
    self._block("init")

  def _block(self, where):
    if where == self._where:
      threading.Event().wait()

  def write(self, step, values):
    self._block("write")

  def close(self, exit_code=0, summary=None):
    self._block("close")


class Collects:
  def __init__(self, fail_at=None):
    self.steps, self.fail_at, self.closed = [], fail_at, False

  def write(self, step, values):
    if step == self.fail_at:
      raise ConnectionError("network is gone\nsecond line")
    self.steps.append((step, values["x"]))

  def close(self, exit_code=0, summary=None):
    self.steps.append(summary)
    self.closed = True


def background(make_writer, **options):
  said = []
  options = {"name": "Logger", "close_timeout": 0.5, "say": said.append} | options
  return log.Background(make_writer, **options), said


@pytest.mark.parametrize("where", ["init", "write", "close"])
def test_a_logger_that_blocks_costs_nothing(where):
  """It blocks for good: that write() and close() return is the proof."""
  w, said = background(lambda: Hangs(where), capacity=100)
  for step in range(1000):
    w.write(step, {"x": 1.0})
  w.close(summary={"best": 1.0})
  assert sum("did not finish" in line for line in said) == 1
  if where in ("init", "write"):
    assert sum("does not keep up" in line for line in said) == 1
    (count,) = [line for line in said if "records were dropped" in line]
    assert 999 <= int(count.split()[1]) <= 1002


def test_a_logger_that_raises_is_switched_off_with_one_line():
  inner = Collects(fail_at=3)
  w, said = background(lambda: inner)
  for step in range(50):
    w.write(step, {"x": 0})
    time.sleep(0.001)
  w.close()
  assert [step for step, _ in inner.steps] == [0, 1, 2]
  assert len(said) == 1 and "network is gone;" in said[0]


def test_a_logger_that_cannot_start_is_switched_off():
  def make():
    raise SystemExit(3)

  w, said = background(make)
  w.write(1, {"x": 1})
  w.close()
  assert len(said) == 1 and "Logger logging is off" in said[0]


def test_records_arrive_in_order_as_they_were():
  inner = Collects()
  w, said = background(lambda: inner)
  values = {}
  for step in range(200):
    values["x"] = step
    w.write(step, values)
  w.close(summary={"best": 1.0})
  assert inner.steps == [(s, s) for s in range(200)] + [{"best": 1.0}]
  assert inner.closed and said == []


def test_a_blocked_logger_does_not_hold_the_exit():
  done = run_script(
    """
      import threading
      from nanosam.run import log
      w = log.Background(threading.Event().wait, name="L", close_timeout=0.2, say=print)
      w.write(1, {})
      w.close()
      print("end")
      """
  )
  assert done.returncode == 0 and done.stdout.endswith("end\n"), done
