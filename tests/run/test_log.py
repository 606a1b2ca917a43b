"""Writers: what is on disk after resumes and kills, and that no logger can hold up a run."""

import io
import itertools
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from helpers.training import ROOT
from helpers.wandb_files import items, of_type, offline_files, wandb_records

from nanosam.run import log, metrics_file, wandb_process
from nanosam.system import progress
from nanosam.system.errors import UsageError, UserError

RUN = {"name": "n", "group": "g", "tags": ["a", "b"], "project": "p"}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
  """No account, no server: whatever this machine has must not matter."""
  for name in list(os.environ):
    if name.startswith("WANDB_"):
      monkeypatch.delenv(name)
  monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
  monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
  monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def open_all(workdir, **changes):
  options = {
    "config": {"opt": {"lr": 0.1}},
    "run": RUN,
    "wandb": "disabled",
    "tensorboard": False,
    "resume_step": None,
    "say": lambda text: None,
  }
  return log.open_writers(workdir, **options | changes)


def run_script(code, *args, timeout):
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
    cwd=ROOT,
    timeout=timeout,
    capture_output=True,
    text=True,
    check=False,
  )


# --- metrics.jsonl ---


def strict_lines(path):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_records_are_strict_json_and_read_back(tmp_path):
  w = open_all(tmp_path)
  w.write(1, {"train/loss": math.nan, "opt/grad_norm": math.inf, "low": -math.inf, "note": "x"})
  w.write(np.int64(2), {"train/loss": np.float32(0.5), "guard/nonfinite": np.int32(3)})
  first, second = strict_lines(tmp_path / "metrics.jsonl")  # before close: nothing is buffered
  assert next(iter(first)) == "step" and first["train/loss"] == "NaN"
  assert second == {"step": 2, "train/loss": 0.5, "guard/nonfinite": 3}
  w.close()
  back = metrics_file.read_metrics(tmp_path / "metrics.jsonl")[0]
  assert math.isnan(back.pop("train/loss"))
  assert back == {"step": 1, "opt/grad_norm": math.inf, "low": -math.inf, "note": "x"}


@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "tra', b'{"step": 2}'])
def test_resume_drops_later_records_and_a_torn_line(tmp_path, tail):
  path = tmp_path / "metrics.jsonl"
  w = open_all(tmp_path)
  for step in range(1, 5):
    w.write(step, {"x": step})
  w.close()
  with open(path, "ab") as f:
    f.write(tail)
  assert len(metrics_file.read_metrics(path)) == 4 + (tail == b'{"step": 2}')
  w = open_all(tmp_path, resume_step=2)
  w.write(3, {"x": 30})
  w.close()
  whole_but_unended = [2] if tail == b'{"step": 2}' else []
  assert [r["step"] for r in strict_lines(path)] == [1, 2, *whole_but_unended, 3]
  assert list(tmp_path.iterdir()) == [path]


def test_fresh_start_drops_records_that_no_checkpoint_backs(tmp_path):
  for _ in range(2):
    w = open_all(tmp_path)
    w.write(0, {"x": 1})
    w.close()
  assert len(metrics_file.read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_damage_in_the_middle_is_reported_not_skipped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(UserError, match="line 2"):
    metrics_file.read_metrics(path)
  with pytest.raises(UserError, match="line 2"):
    open_all(tmp_path, resume_step=3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_names_the_file(tmp_path):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  w = open_all(tmp_path)
  with pytest.raises(UserError, match=r"metrics\.jsonl: No space left"):
    w.write(1, {"x": 1})
  w.close()


def test_unknown_wandb_mode_is_a_usage_error(tmp_path):
  with pytest.raises(UsageError, match="auto, online, offline, disabled"):
    open_all(tmp_path, wandb="on")


# --- TensorBoard ---


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


# --- background ---


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
      """,
    timeout=10,
  )
  assert done.returncode == 0 and done.stdout.endswith("end\n"), done


# --- W&B ---


def test_wandb_offline_run_and_its_resume(tmp_path):
  said = []
  for resume in (None, 3):
    w = open_all(tmp_path, wandb="auto", resume_step=resume, say=said.append)
    for step in range((resume or 0) + 1, (resume or 0) + 6):
      loss = math.nan if step == 2 else 1 / step
      w.write(step, {"train/loss": loss, "tokens": 64 * step, "compute": 1e20, "time": 0.5})
    w.close(summary={"eval/loss_best": 0.25, "eval/loss_last": 0.5})
  assert len(said) == 2 and all("offline" in line for line in said), said
  first, second = ([*wandb_records(path)] for path in offline_files(tmp_path))
  run_id = (tmp_path / "wandb_run_id").read_text().strip()
  for records in (first, second):
    (run,) = of_type(records, "run")
    assert (run.run_id, run.display_name, run.run_group) == (run_id, "n", "g")
    assert (run.project, list(run.tags)) == ("p", ["a", "b"])
    assert {u.key: u.value_json for u in run.config.update}["opt"] == '{"lr":0.1}'
    assert of_type(records, "exit")[0].exit_code == 0
    summary = {k: v for s in of_type(records, "summary") for k, v in items(s).items()}
    assert (summary["eval/loss_best"], summary["eval/loss_last"]) == (0.25, 0.5)
  metrics = {m.name or m.glob_name: m for m in of_type(first, "metric")}
  assert {"step", "tokens", "compute", "time"} <= set(metrics)
  assert metrics["*"].step_metric == "step"
  assert metrics["eval/loss"].summary.min and metrics["eval/loss"].summary.last
  rows = [items(h) for records in (first, second) for h in of_type(records, "history")]
  assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]  # written again after 3
  assert [r["_step"] for r in rows] == list(range(10))  # W&B's own never goes back
  assert math.isnan(rows[1]["train/loss"]) and rows[9]["tokens"] == 512


def test_wandb_disabled_is_never_imported_or_started(tmp_path, monkeypatch):
  open_all(tmp_path).close()
  monkeypatch.setenv("WANDB_MODE", "disabled")
  open_all(tmp_path, wandb="auto").close()
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
  done = run_script("import sys, nanosam.run.log; print('wandb' in sys.modules)", timeout=10)
  assert done.stdout == "False\n"


def test_wandb_mode_follows_the_credentials(monkeypatch, tmp_path):
  import wandb

  def choose():
    return wandb_process._choose_mode(wandb, "auto")

  assert choose() == "offline"
  netrc = tmp_path / "netrc"
  netrc.write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
  netrc.chmod(0o600)
  monkeypatch.setenv("NETRC", str(netrc))
  assert choose() == "online"
  monkeypatch.setenv("WANDB_MODE", "offline")
  assert choose() == "offline"
  monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
  monkeypatch.delenv("WANDB_MODE")
  monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
  assert choose() == "online"


def test_wandb_keeps_what_it_got_when_the_run_is_killed(tmp_path):
  done = run_script(
    """
      import os, signal, sys, threading
      from nanosam.run import log
      started = threading.Event()
      w = log.open_writers(sys.argv[1], config={}, run={}, wandb="offline", tensorboard=False,
                               resume_step=None, say=lambda text: started.set())
      for step in range(5):
        w.write(step, {"x": step})
      assert started.wait(60)
      os.kill(os.getpid(), signal.SIGKILL)
      """,
    tmp_path,
    timeout=90,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  deadline = time.monotonic() + 30
  exits = []
  while not exits and time.monotonic() < deadline:
    time.sleep(0.2)
    records = [*wandb_records(offline_files(tmp_path)[0])]
    exits = of_type(records, "exit")
  assert exits[0].exit_code == 1
  assert [items(h)["step"] for h in of_type(records, "history")] == [0, 1, 2, 3, 4]


@pytest.fixture
def dead_server(monkeypatch):
  """Accepts connections and never answers: a network that hangs."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield


def test_wandb_that_hangs_holds_neither_training_nor_exit(tmp_path, dead_server):
  """The server never answers: that the script ends is the proof."""
  done = run_script(
    """
      import sys
      from nanosam.run import log
      w = log.open_writers(sys.argv[1], config={}, run={}, wandb="online", tensorboard=False,
                               resume_step=None, close_timeout=3.0)
      for step in range(1000):
        w.write(step, {"x": step})
      w.close()
      """,
    tmp_path,
    timeout=30,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("\n") <= 3 and "W&B did not finish within 3 s" in done.stderr
  assert len(metrics_file.read_metrics(tmp_path / "metrics.jsonl")) == 1000
  assert all_gone_within(10, tmp_path)


def test_wandb_process_that_hangs_can_be_killed(tmp_path, dead_server):
  w = wandb_process.WandbProcess(
    tmp_path, mode="online", config={}, run={}, say=print, close_timeout=60.0
  )
  w.kill()
  assert all_gone_within(5, tmp_path)


def test_wandb_process_that_hangs_does_not_outlive_a_killed_run(tmp_path, dead_server):
  done = run_script(
    """
      import os, signal, sys, time
      from nanosam.run import wandb_process
      w = wandb_process.WandbProcess(sys.argv[1], mode="online", config={}, run={}, say=print,
                                    close_timeout=1.0)
      time.sleep(2)
      os.kill(os.getpid(), signal.SIGKILL)
      """,
    tmp_path,
    timeout=30,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert all_gone_within(6, tmp_path)


def all_gone_within(seconds, workdir):
  deadline = time.monotonic() + seconds
  while own_processes(workdir) and time.monotonic() < deadline:
    time.sleep(0.1)
  return not own_processes(workdir)


def own_processes(workdir):
  """Processes that still hold this workdir's log open."""
  log = str((workdir / "wandb" / "nanosam.log").resolve())
  found = []
  for stderr in pathlib.Path("/proc").glob("[0-9]*/fd/2"):
    try:
      found += [stderr.parts[2]] if os.readlink(stderr) == log else []
    except OSError:  # ended meanwhile, or someone else's
      continue
  return found


@pytest.mark.full
def test_wandb_without_its_server_records_offline(tmp_path, dead_server):
  said = []
  w = open_all(tmp_path, wandb="online", say=said.append, close_timeout=60.0)
  w.write(1, {"x": 1})
  w.close()
  assert "cannot be reached" in said[0], said
  records = [*wandb_records(offline_files(tmp_path)[0])]
  assert [items(h)["step"] for h in of_type(records, "history")] == [1]


# --- progress ---


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
