import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers.scripts import load_script
from helpers.training import CONFIG, ROOT

from nanosam.run.metrics_file import read_metrics
from nanosam.study import backends, runs, sweeps
from nanosam.system.errors import UsageError

TINY = str(CONFIG)


def test_product_and_together():
  assert sweeps.product({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
  pairs = sweeps.together({"seed": [1, 2], "data_seed": [5, 6]})
  assert pairs == [{"seed": 1, "data_seed": 5}, {"seed": 2, "data_seed": 6}]
  assert len(sweeps.product({"a": [1, 2, 3]}, pairs)) == 6
  with pytest.raises(UsageError, match="2, 1 values"):
    sweeps.together({"a": [1, 2], "b": [3]})
  with pytest.raises(UsageError, match="seed twice"):
    sweeps.product({"seed": [1]}, pairs)


def test_ids_name_what_matters_and_nothing_else(tmp_path):
  def name(spec=TINY, **overrides):
    overrides = {k.replace("__", "."): v for k, v in overrides.items()}
    return sweeps.make_jobs([(spec, overrides)], tmp_path)[0].id

  assert name() == name(log_every_steps=7, wandb__mode="offline", mesh__data=1)
  assert name(opt__method="sam") == name(f"{TINY}:method=sam")
  assert name(opt__rho=0.3) == name()  # which adamw does not have
  others = [name(seed=2), name(opt__method="sam"), name(opt__method="sam", opt__rho=0.3)]
  assert len({name(), *others}) == 4
  assert name(opt__method="sam", opt__rho=0.3).startswith("sam-D16-n16-lr0.01-wd0.1-rho0.3-s42-")


def test_a_key_that_is_younger_than_a_run_leaves_its_id(tmp_path):
  config = json.loads(json.dumps(sweeps.make_jobs([(TINY, {})], tmp_path)[0].config.to_dict()))
  del config["opt"]["asam_eta"], config["guard"]["spike"]
  assert runs.run_id(config) == sweeps.make_jobs([(TINY, {})], tmp_path)[0].id


def test_bad_runs_are_refused_before_any_begins(tmp_path):
  with pytest.raises(UsageError, match="two runs of one id"):
    sweeps.make_jobs([(TINY, {"opt.rho": 0.1}), (TINY, {"opt.rho": 0.2})], tmp_path)
  with pytest.raises(UsageError, match=r"did you mean opt\.rho"):
    sweeps.make_jobs([(TINY, {"opt.roh": 0.1})], tmp_path)
  with pytest.raises(UsageError, match="must be at least 1"):
    sweeps.make_jobs([(TINY, {}), (TINY, {"batch_size": 0})], tmp_path)
  broken = tmp_path / "broken.py"
  broken.write_text("def runs(arg):\n  return 1 / 0\n")
  with pytest.raises(UsageError, match=r"broken.py, line 2: ZeroDivisionError"):
    sweeps.load(str(broken))
  with pytest.raises(UsageError, match="does not exist"):
    sweeps.load(str(tmp_path / "none.py"))


def test_each_job_has_its_share_of_the_devices():
  four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
  assert backends.share_of_devices(1, 2, four) == {"CUDA_VISIBLE_DEVICES": "1,3"}
  assert backends.share_of_devices(0, 1, four) == backends.share_of_devices(1, 2, {}) == {}
  with pytest.raises(UsageError, match="too few for 5 at a time"):
    backends.share_of_devices(0, 5, four)


def test_the_example_is_a_sweep_of_paired_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  words = ["--sweep=launch/sweeps/example.py:40", f"--out={tmp_path}", "--dry_run"]
  load_script("launch/sweep.py").main(["sweep.py", *words])
  lines = capsys.readouterr().out.splitlines()
  runs = 2 * (1 + 2 * 3)  # seeds; AdamW, and two methods at three values of rho
  assert lines[-1].startswith(f"# {runs} runs, ")
  commands = [line for line in lines if not line.startswith("#")]
  assert len(commands) == runs
  for command in commands:
    assert "configs/mini.py:steps=40,method=" in command
    seed = command.split("--config.seed=")[1].split()[0]
    assert f"--config.data_seed={seed}" in command


SWEEP = f"""
from nanosam.study.sweeps import product

def runs(arg=None):
  base = {{"opt.num_train_steps": [int(arg)], "checkpoint_every_steps": [50]}}
  sam = product(base, {{"opt.rho": [0.05]}})
  return [("{TINY}:method=sam", o) for o in sam] + [("{TINY}", o) for o in product(base)]
"""


@pytest.fixture
def start(tmp_path, cache):
  file = tmp_path / "my_sweep.py"
  file.write_text(SWEEP)

  def start(arg, *words):
    command = [sys.executable, "launch/sweep.py", f"--sweep={file}:{arg}", f"--out={tmp_path}/out"]
    environment = {**os.environ, "NANOSAM_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
      [*command, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    started.append(process)
    return process

  started = []
  yield start
  for process in started:  # of a test that failed on the way
    if process.poll() is None:
      process.terminate()
      process.communicate(timeout=100)


def test_dry_run_prints_commands_and_makes_nothing(start, tmp_path):
  out, err = start(16, "--dry_run").communicate(timeout=60)
  assert "--config.opt.rho=0.05" in out and "# 2 runs, 8.19e+03 tokens" in out, err
  assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_sweep_end_to_end(start, tmp_path):
  """Interrupted, continued, then nothing left to do. A run that cannot start stops the sweep before
  its first run; one that fails on the way does not stop the rest."""
  process = start(200)
  first = wait_for(lambda: next((tmp_path / "out").glob("sam-*/metrics.jsonl"), None))
  wait_for(lambda: read_metrics(first))
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=200)
  assert process.returncode == 75, err
  assert "stopped with 0 of 2 runs finished; resume with: python launch/sweep.py" in err
  assert "not started" in out and "interrupted" in out
  stopped = read_metrics(first)[-1]["step"]
  assert 0 < stopped < 200

  process = start(200)
  out, err = process.communicate(timeout=400)
  assert process.returncode == 0, out + err
  assert f"resuming {first.parent} at step {stopped}" in (first.parent / "train.log").read_text()
  assert out.count("finished after") == 2
  out, err = start(200).communicate(timeout=60)
  assert out.count("finished before") == 2 and "started" not in out

  file = tmp_path / "my_sweep.py"
  file.write_text(SWEEP.replace("0.05]", '0.05], "data.source": ["tokens:nowhere"]'))
  process = start(16)
  out, err = process.communicate(timeout=300)
  assert process.returncode == 1 and "nowhere" in err and "started" not in out

  file.write_text(SWEEP.replace("0.05]", '0.05], "opt.peak_learning_rate": [1e30]'))
  process = start(16)
  out, err = process.communicate(timeout=300)
  assert process.returncode == 1
  assert "1 of 2 runs are not finished" in err and "finished after" in out


def wait_for(condition):
  deadline = time.monotonic() + 200
  while not (found := condition()):
    assert time.monotonic() < deadline
    time.sleep(0.05)
  return found


def test_each_job_has_its_share_of_the_cores():
  assert [backends.share_of_cores(i, 2, {4, 5, 6, 7}) for i in range(2)] == [[4, 5], [6, 7]]
  assert [backends.share_of_cores(i, 2, range(5)) for i in range(2)] == [[0, 1], [2, 3, 4]]
  assert backends.share_of_cores(1, 2, [3]) == [3]  # a machine with one core


def test_long_runs_come_first_each_on_its_cores(tmp_path, monkeypatch, capsys):
  steps = {"short": 10, "long": 1000, "middle": 100}
  specs = [(TINY, {"opt.num_train_steps": n}) for n in steps.values()]
  jobs = sweeps.make_jobs(specs, tmp_path)
  code = "import os, time; print(sorted(os.sched_getaffinity(0))); time.sleep(1)"
  monkeypatch.setattr(backends, "REPORT_EVERY", 0.3)
  backends.local(jobs, 2, command=lambda job: [sys.executable, "-c", code])
  said = capsys.readouterr().out
  started = re.findall(r"-n(\d+)-\S+: started", said)
  assert started == ["1000", "100", "10"]
  assert "step 0 of 1000, ? left" in said
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) > 1:
    used = [json.loads((job.workdir / "train.log").read_text()) for job in jobs]
    assert used[1] == backends.share_of_cores(0, 2, cores) and used[2] == backends.share_of_cores(
      1, 2, cores
    )


def test_runs_save_and_stop_when_the_sweep_is_killed(tmp_path):
  child = (
    "import pathlib, signal, sys, time\n"
    f"told = lambda *_: (pathlib.Path({str(tmp_path)!r}, 'told').touch(), sys.exit(75))\n"
    "signal.signal(signal.SIGTERM, told)\n"
    f"pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
    "time.sleep(60)\n"
  )
  code = (
    "import pathlib, sys\nfrom nanosam.study import backends, sweeps\n"
    f"jobs = sweeps.make_jobs([({TINY!r}, {{}})], pathlib.Path({str(tmp_path)!r}))\n"
    f"backends.local(jobs, 1, command=lambda job: [sys.executable, '-c', {child!r}])\n"
  )
  sweep = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
  wait_for((tmp_path / "ready").exists)
  sweep.kill()
  sweep.wait()
  wait_for((tmp_path / "told").exists)


@pytest.mark.parametrize(
  "body, said",
  [
    ("return None", r"line 2: runs\(\) returned NoneType; expected a list such as"),
    ("return {'a': 1}", r"returned dict; expected a list such as \[\('configs/mini.py"),
    ("return ['configs/mini.py']", r"line 2: runs\(\), item 1 is 'configs/mini.py'; expected"),
    ("return [('a.py', {}), ('a.py', 3)]", r"item 2 is .*'a.py', 3.*; expected a list"),
    ("return 1 / 0", r"sweep.py, line 3: ZeroDivisionError"),
    (f"return [({TINY!r}, {{}}), ({TINY!r}, {{'opt.roh': 1}})]", r"run 2 of the sweep, .*opt\.rho"),
  ],
)
def test_a_mistake_in_a_sweep_file_is_named(tmp_path, body, said):
  file = tmp_path / "sweep.py"
  file.write_text(f"\ndef runs(arg=None):\n  {body}\n")
  with pytest.raises(UsageError, match=said):
    sweeps.make_jobs(sweeps.load(str(file)), tmp_path)
