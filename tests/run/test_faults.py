"""Bad input and bad luck: one clear line, the right exit code, and nothing lost."""

import errno
import json
import math
import os
import pathlib
import shutil
import subprocess

import pytest
from helpers.training import CONFIG, assert_same_run, steps
from helpers.wandb_files import wandb_exit_code

from nanosam.run import workdir as workdir_lib
from nanosam.run.metrics_file import read_metrics
from nanosam.system.errors import UsageError

BAD_REQUEST, FAILED = 2, 1


@pytest.fixture
def copy(whole, tmp_path):
  """A finished run of 16 steps with checkpoints 12 and 16."""
  return shutil.copytree(whole, tmp_path / "run")


# The request.


def test_bad_requests(commands, tmp_path):
  workdir = f"--config.workdir={tmp_path}/run"
  requests = {
    (): ["no config", "--config=configs/FILE.py"],
    (f"--config={tmp_path}/nothing.py",): ["nothing.py", "does not exist"],
    ("--config=configs/quikstart.py",): ["did you mean quickstart.py"],
    (f"--config={CONFIG}", workdir, "--config.opt.peak_learning_rat=1"): [
      "unknown config key 'opt.peak_learning_rat'",
      "did you mean opt.peak_learning_rate",
    ],
    (f"--config={CONFIG}", workdir, "--config.batch_size=eight"): ["batch_size=eight", "an int"],
    (f"--config={CONFIG}", workdir, "--config.model.H=3"): ["model.D=16", "model.H=3"],
    (f"--config={CONFIG}", workdir, "--config.data.source=tokens:/nothing"): ["/nothing"],
  }
  started = [commands.start("train", *words) for words in requests]
  for process, parts in zip(started, requests.values(), strict=True):
    _, err = process.communicate(timeout=120)
    assert process.returncode in (BAD_REQUEST, FAILED), err
    assert err.startswith("nanosam: ") and err.count("\n") == 1, err
    for part in parts:
      assert part in err
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_config_file_that_fails(commands, tmp_path):
  file = tmp_path / "broken.py"
  file.write_text("def get_config(arg=None):\n  return 1 / 0\n")
  outcome = commands("train", f"--config={file}")
  assert outcome.code == BAD_REQUEST
  outcome.says_in_one_line("broken.py", "ZeroDivisionError")


# The workdir.


def test_a_workdir_that_cannot_be_made(commands, tmp_path):
  (tmp_path / "file").write_text("")
  for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
    outcome = commands.train(workdir)
    assert outcome.code == BAD_REQUEST
    outcome.says_in_one_line("cannot write to workdir", str(workdir))


@pytest.mark.full
def test_a_workdir_on_a_read_only_disk(commands, tmp_path):
  with mounted(tmp_path / "disk", "ro") as disk:
    outcome = commands.train(disk / "run")
  assert outcome.code == BAD_REQUEST
  outcome.says_in_one_line("cannot write to workdir", os.strerror(errno.EROFS))


@pytest.mark.parametrize("content", ['{"batch_size": 8,', "[]"])
def test_a_broken_config_json(commands, copy, content):
  shutil.rmtree(copy / "checkpoints" / "16")
  (copy / "config.json").write_text(content)
  outcome = commands.train(copy)
  assert outcome.code == BAD_REQUEST
  outcome.says_in_one_line("config.json", "restore it")
  assert steps(copy) == [12]


def test_two_runs_do_not_share_a_workdir(tmp_path):
  workdir_lib.claim(tmp_path)
  with pytest.raises(UsageError, match="another process is training"):
    workdir_lib.claim(tmp_path)


# Checkpoints that cannot be read; test_checkpoint.py has every kind of damage.


def damage(checkpoint: pathlib.Path, how: str) -> None:
  """To the largest file, which holds arrays."""
  file = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  content = bytearray(file.read_bytes())
  middle = len(content) // 2
  if how == "delete":
    file.unlink()
  elif how == "truncate":
    file.write_bytes(content[:middle])
  elif how == "garble":
    content[middle : middle + 8] = bytes(b ^ 0x55 for b in content[middle : middle + 8])
    file.write_bytes(content)


@pytest.mark.parametrize(
  "how", ["garble", *(pytest.param(h, marks=pytest.mark.full) for h in ("truncate", "delete"))]
)
def test_a_damaged_newest_checkpoint(commands, whole, copy, how):
  damage(copy / "checkpoints" / "16", how)
  outcome = commands.train(copy)
  assert outcome.code == 0, outcome.err
  assert "checkpoint 16 cannot be read" in outcome.err and "at step 12" in outcome.err
  assert "Traceback" not in outcome.err and "Exception" not in outcome.err
  assert (copy / "unreadable_checkpoints" / "16").is_dir()
  assert_same_run(copy, whole)


def test_no_checkpoint_can_be_read(commands, copy):
  for step in (12, 16):
    damage(copy / "checkpoints" / str(step), "truncate")
  before = (copy / "metrics.jsonl").read_bytes()
  outcome = commands.train(copy)
  assert outcome.code == FAILED
  outcome.says_in_one_line("none of the checkpoints [12, 16]", "move that folder away")
  assert steps(copy) == [12, 16] and (copy / "metrics.jsonl").read_bytes() == before


# Numbers that are not finite.


def test_a_bad_batch_ends_the_run_and_says_all_that_is_known(commands, whole, tmp_path):
  workdir = tmp_path / "run"
  outcome = commands.train(workdir, fault="nan@data:6", wandb__mode="offline")
  assert outcome.code == FAILED
  outcome.says_in_one_line(
    "step 6 is not finite",
    "batch rows [3]",
    "gradient norms: embed nan, layer_0 nan",
    "the last good checkpoint is step 4",
    "--config.guard.policy=skip",
  )
  assert steps(workdir) == [4]
  last = read_metrics(workdir / "metrics.jsonl")[-1]
  assert (last["step"], last["guard/nonfinite"]) == (6, 1) and math.isnan(last["train/loss"])
  assert wandb_exit_code(workdir) == FAILED
  assert commands.train(workdir).code == 0  # the same batch, now as it should be
  assert_same_run(workdir, whole)


def test_a_radius_that_blows_up_the_second_pass(commands, tmp_path):
  outcome = commands.train(tmp_path / "run", opt__method="sam", opt__rho=1e38)
  assert outcome.code == FAILED
  outcome.says_in_one_line(
    "step 1 is not finite", "perturbed_nonfinite 1", "nonfinite 0", "Lower the learning rate or rho"
  )


# A full disk.


def test_a_disk_that_is_full_while_saving(commands, whole, tmp_path):
  workdir = tmp_path / "run"
  outcome = commands.train(workdir, fault="full:25000@step:6")  # smaller than the embedding
  assert outcome.code == FAILED
  outcome.says_in_one_line("could not save", "last good one is step 4", "Free some space")
  assert steps(workdir) == [4]
  assert commands.train(workdir).code == 0
  assert_same_run(workdir, whole)


def test_a_disk_that_is_full_for_metrics(commands, tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  (workdir / "metrics.jsonl").symlink_to("/dev/full")
  outcome = commands.train(workdir)
  assert outcome.code == FAILED
  outcome.says_in_one_line("metrics.jsonl", os.strerror(errno.ENOSPC), "make room")


class mounted:
  """A small disk of its own, where the system permits it."""

  def __init__(self, path: pathlib.Path, options: str):
    path.mkdir()
    self.path = path
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
      subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
      pytest.skip("this system does not let us mount a disk")

  def __enter__(self) -> pathlib.Path:
    return self.path

  def __exit__(self, *_: object) -> None:
    subprocess.run(["umount", str(self.path)], check=True)


@pytest.mark.full
@pytest.mark.parametrize("kilobytes", [4, 16, 40, 80, 120, 160, 240, 320, 400, 600])
def test_a_small_disk(commands, whole, tmp_path, kilobytes):
  """Wherever the space ends, the run says so, and goes on once there is more."""
  with mounted(tmp_path / "disk", f"size={kilobytes}k") as disk:
    workdir = disk / "run"
    outcome = commands.train(workdir)
    if outcome.code == 0:
      return
    assert outcome.code == FAILED, outcome.err
    outcome.says_in_one_line(str(workdir), "the same command")
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    good = steps(workdir) if (workdir / "checkpoints").exists() else []
    outcome = commands.train(workdir)
    assert outcome.code == 0, outcome.err
    assert not good or f"at step {good[-1]}" in outcome.err
    assert_same_run(workdir, whole)


@pytest.mark.full
def test_config_json_survives_a_full_disk(commands, copy):
  """It is written anew at each start; what was there stays whole."""
  shutil.rmtree(copy / "checkpoints" / "16")
  before = json.loads((copy / "config.json").read_text())
  outcome = commands.train(copy, fault="full:1000@compile")
  assert outcome.code == FAILED
  outcome.says_in_one_line("the same command")
  assert json.loads((copy / "config.json").read_text()) == before
