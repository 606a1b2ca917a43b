"""W&B: what it records offline, and that its process neither hangs a run nor outlives it."""

import math
import os
import pathlib
import signal
import socket
import time

import pytest
from helpers.wandb_files import items, of_type, offline_files, wandb_records
from helpers.writers import open_all, run_script

from nanosam.run import metrics_file, wandb_process


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
  """No account, no server: whatever this machine has must not matter."""
  for name in list(os.environ):
    if name.startswith("WANDB_"):
      monkeypatch.delenv(name)
  monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
  monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
  monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


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
  done = run_script("import sys, nanosam.run.log; print('wandb' in sys.modules)")
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
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  deadline = time.monotonic() + 120
  exits = []
  while not exits and time.monotonic() < deadline:
    time.sleep(0.2)
    records = [*wandb_records(offline_files(tmp_path)[0])]
    exits = of_type(records, "exit")
  assert exits[0].exit_code == 1
  assert [items(h)["step"] for h in of_type(records, "history")] == [0, 1, 2, 3, 4]
  assert all_gone(tmp_path)


@pytest.fixture
def dead_server(monkeypatch):
  """Accepts connections and never answers: a network that hangs."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield


def test_wandb_that_hangs_holds_neither_training_nor_exit(tmp_path, dead_server):
  """The server never answers: close() gives up, kills W&B's process, and the script ends."""
  done = run_script(
    """
      import sys
      from nanosam.run import log
      kill = log.WandbProcess.kill
      log.WandbProcess.kill = lambda self: (print("killed"), kill(self))
      w = log.open_writers(sys.argv[1], config={}, run={}, wandb="online", tensorboard=False,
                               resume_step=None, close_timeout=3.0)
      for step in range(1000):
        w.write(step, {"x": step})
      print("written")
      w.close()
      print("closed")
      """,
    tmp_path,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["written", "killed", "closed"]
  assert done.stderr.count("\n") <= 3 and "W&B did not finish within 3 s" in done.stderr
  assert len(metrics_file.read_metrics(tmp_path / "metrics.jsonl")) == 1000
  assert all_gone(tmp_path)


def test_wandb_process_that_hangs_can_be_killed(tmp_path, dead_server):
  # Left alone it would wait for the server for five minutes.
  w = wandb_process.WandbProcess(
    tmp_path, mode="online", config={}, run={}, say=print, close_timeout=600.0
  )
  assert own_processes(tmp_path)
  w.kill()
  assert all_gone(tmp_path)


@pytest.fixture
def endless_import(tmp_path, monkeypatch):
  """A `wandb` that never comes back from its import, in processes that are started from here."""
  folder = tmp_path / "modules"
  folder.mkdir()
  (folder / "wandb.py").write_text("import threading\nthreading.Event().wait()\n")
  monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


def test_wandb_process_that_hangs_does_not_outlive_a_killed_run(tmp_path, endless_import):
  done = run_script(
    """
      import os, signal, sys
      from nanosam.run import wandb_process
      w = wandb_process.WandbProcess(sys.argv[1], mode="online", config={}, run={}, say=print,
                                    close_timeout=1.0)
      os.kill(os.getpid(), signal.SIGKILL)
      """,
    tmp_path,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert all_gone(tmp_path)


def all_gone(workdir):
  """Sooner or later; the machine may be slow."""
  deadline = time.monotonic() + 120
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
