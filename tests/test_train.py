"""The training command from end to end: what a run leaves behind, and how it goes on."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers.training import CONFIG, ROOT, assert_same_run, losses, state, steps

from nanosam import config as config_lib
from nanosam.run.metrics_file import read_metrics
from nanosam.run.record import check_data
from nanosam.run.restore import load_run
from nanosam.system.errors import UserError


@pytest.fixture
def at_12(whole, tmp_path):
  """The same run as if it had been killed at its end, before the last checkpoint."""
  return until_12(whole, tmp_path / "run")


def until_12(whole: pathlib.Path, workdir: pathlib.Path) -> pathlib.Path:
  shutil.copytree(whole, workdir)
  shutil.rmtree(workdir / "checkpoints" / "16")
  return workdir


def content(workdir: pathlib.Path) -> dict[str, tuple[int, int]]:
  files = (p for p in workdir.rglob("*") if p.is_file())
  return {str(p.relative_to(workdir)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


# What a run leaves behind.


def test_config_json_is_complete(whole):
  config = json.loads((whole / "config.json").read_text())
  environment = config.pop("environment")
  assert config_lib.flat(config).keys() == config_lib.flat(config_lib.default()).keys()
  assert config["batch_size"] == 8 and config["opt"]["init_learning_rate"] == pytest.approx(1e-3)
  assert environment["packages"]["jax"] == jax.__version__
  assert None not in environment["packages"].values()
  assert environment["devices"] == {"kind": "cpu", "count": 1, "processes": 1}
  assert environment["parameters"] > environment["non_embedding_parameters"] > 0
  assert environment["eval_set"]["bytes"] > 0
  if (ROOT / ".git").exists():
    assert len(environment["git_commit"].removesuffix("-dirty")) == 40


def test_metrics_have_the_keys_of_the_contract(whole):
  records = read_metrics(whole / "metrics.jsonl")
  training = [r for r in records if "train/loss" in r]
  evals = [r for r in records if "eval/loss" in r]
  assert [r["step"] for r in training] == list(range(1, 17))
  assert [r["step"] for r in evals] == [8, 16]
  performance = {"perf/tokens_per_sec", "perf/step_time", "perf/data_wait"}
  optimizer = {"opt/lr", "opt/rho", "opt/grad_norm", "guard/nonfinite"}
  for record in training:
    assert next(iter(record)) == "step"
    assert not (performance | optimizer) - record.keys()
  for record in evals:
    assert record.keys() >= {"eval/loss", "eval/loss_sem", "eval/bits_per_byte"}
  epochs = np.array([r["data/epoch"] for r in training])
  np.testing.assert_allclose(epochs, epochs[0] * np.arange(1, 17))
  assert [r["tokens"] for r in training] == [8 * 32 * step for step in range(1, 17)]
  assert evals[1]["eval/loss"] < evals[0]["eval/loss"] - 0.1 < np.log(512)


def test_sequence_losses_agree_with_the_last_evaluation(whole):
  record = read_metrics(whole / "metrics.jsonl")[-1]
  with np.load(whole / "eval_sequences.npz") as saved:
    nll, weight, step, num_bytes = (saved[k] for k in ("nll", "weight", "step", "bytes"))
  assert step == record["step"] == 16
  loss = nll.sum() / weight.sum()
  assert loss == record["eval/loss"]
  # Left out one by one: stretches as long as two documents, but two of them at least.
  environment = json.loads((whole / "config.json").read_text())["environment"]
  R, documents = len(nll), environment["eval_set"]["documents"]
  starts = range(0, R, min(-(-2 * R // documents), -(-R // 2)))
  nll_U, weight_U = (np.add.reduceat(x, starts) for x in (nll, weight))
  others = (nll.sum() - nll_U) / (weight.sum() - weight_U)
  jackknife = np.sqrt((len(starts) - 1) * np.mean((others - loss) ** 2))
  assert record["eval/loss_sem"] == pytest.approx(jackknife, rel=0.1) and jackknife > 0
  assert record["eval/bits_per_byte"] == pytest.approx(nll.sum() / np.log(2) / num_bytes)


def test_tensorboard_reads_the_run(whole):
  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(str(whole)).Reload()
  shown = [(e.step, e.value) for e in events.Scalars("eval/loss")]
  recorded = [(s, v) for s, name, v in losses(whole) if name == "eval/loss"]
  np.testing.assert_allclose(shown, recorded, rtol=1e-6)


def test_the_newest_and_the_best_checkpoints_are_kept(whole):
  assert steps(whole) == [12, 16]


def test_training_does_not_import_tensorflow(commands, tmp_path):
  code = "import sys, nanosam.train; sys.exit('tensorflow' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_finished_run_is_left_alone(commands, whole):
  before = content(whole)
  outcome = commands.train(whole)
  assert outcome.code == 0 and "finished" in outcome.err
  assert content(whole) == before


def test_a_finished_record_without_checkpoints_is_not_overwritten(commands, whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir, ignore=shutil.ignore_patterns("checkpoints"))
  before = content(workdir)
  outcome = commands.train(workdir, checkpoint=False)
  assert outcome.code == 1
  outcome.says_in_one_line("record of a finished run", "another workdir")
  assert content(workdir) == before


def test_the_best_checkpoint_is_found_by_the_record(whole, tmp_path):
  """A checkpoint that was saved before its evaluation does not know its own loss."""
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir)
  for metrics in (workdir / "checkpoints").glob("*/metrics"):
    shutil.rmtree(metrics)
  assert load_run(workdir, "best").step == 16


def test_a_record_of_other_settings_is_not_overwritten(commands, whole, tmp_path):
  """As of a run that was killed before its first checkpoint."""
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir, ignore=shutil.ignore_patterns("checkpoints"))
  lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
  (workdir / "metrics.jsonl").write_text("".join(lines[:3]))
  before = content(workdir)
  outcome = commands.train(workdir, seed=7)
  assert outcome.code == 2
  outcome.says_in_one_line("other settings", "seed: 42 -> 7")
  assert content(workdir) == before


# How it goes on.


def test_without_checkpoints_it_does_not_start_over_beside_some(commands, at_12):
  before = content(at_12)
  outcome = commands.train(at_12, checkpoint=False, opt__method="sam")
  assert outcome.code == 2
  outcome.says_in_one_line("holds checkpoints", "another workdir")
  assert content(at_12) == before


def test_a_run_that_is_beyond_its_end(commands, at_12):
  outcome = commands.train(at_12, opt__num_train_steps=10, allow_changed_keys=True)
  assert outcome.code == 2
  outcome.says_in_one_line("is at step 12, beyond opt.num_train_steps=10")
  assert steps(at_12)[-1] == 12


def test_a_run_survives_everything(commands, whole, tmp_path):
  """One run stopped in every way, and resumed by the same command: the result is the same."""
  workdir = tmp_path / "run"

  def interrupted(fault: str) -> None:
    outcome = commands.train(workdir, fault=fault)
    assert outcome.code == 75, outcome.err
    outcome.says_in_one_line("the same command")

  def killed(fault: str) -> None:
    outcome = commands.train(workdir, fault=fault)
    assert outcome.code == -signal.SIGKILL, outcome.err

  interrupted("SIGTERM@compile")
  interrupted("SIGINT@step:5")
  assert steps(workdir)[-1] in (5, 6)
  interrupted("SIGTERM@eval:1")
  assert steps(workdir)[-1] == 8 and losses(workdir)[-1][:2] == (8, "train/loss")
  killed("SIGKILL@saving:12")
  assert steps(workdir)[-1] == 8 and list(workdir.glob("checkpoints/12.*tmp*"))
  killed("SIGKILL@step:15")
  assert steps(workdir)[-1] == 12 and losses(workdir)[-1][0] == 15
  assert commands.train(workdir).code == 0
  assert_same_run(workdir, whole)
  assert not list(workdir.glob("checkpoints/*tmp*"))


@pytest.mark.full
def test_averaged_weights_are_evaluated_resumed_and_loaded(commands, whole, tmp_path):
  straight, killed = tmp_path / "straight", tmp_path / "killed"
  average = {"opt__average": "tail", "opt__average_fraction": 0.5}
  assert commands.train(straight, **average).code == 0
  assert commands.train(killed, fault="SIGKILL@step:15", **average).code == -signal.SIGKILL
  assert commands.train(killed, **average).code == 0
  assert_same_run(killed, straight)
  assert losses(straight) == losses(whole)  # the raw weights do not notice
  *_, last = (r for r in read_metrics(straight / "metrics.jsonl") if "eval/loss" in r)
  raw, averaged = (
    json.loads(commands("evaluate", f"--workdir={straight}", "--json", *words).out)["eval/loss"]
    for words in ([], ["--weights=average"])
  )
  assert (raw, averaged) == (last["eval/loss"], last["eval/loss_average"])
  assert raw != averaged
  outcome = commands("evaluate", f"--workdir={whole}", "--weights=average")
  assert outcome.code == 2
  outcome.says_in_one_line("no averaged weights", "opt.average=none")


@pytest.mark.full
@pytest.mark.parametrize(
  "fault",
  [
    *(f"{name}@{place}" for name in ("SIGTERM", "SIGINT") for place in ("compile", "step:6")),
    *(f"{name}@eval:{n}" for name in ("SIGTERM", "SIGINT", "SIGKILL") for n in (1, 2)),
    *(f"SIGKILL@saving:{step}" for step in (4, 8, 16)),
    *(f"SIGKILL@{place}" for place in ("compile", "step:3", "step:8", "step:11", "step:16")),
  ],
)
def test_a_run_survives(commands, whole, tmp_path, fault):
  workdir = tmp_path / "run"
  outcome = commands.train(workdir, fault=fault)
  if "SIGKILL" in fault:
    assert outcome.code == -signal.SIGKILL, outcome.err
  else:
    assert outcome.code == 75, outcome.err
    outcome.says_in_one_line("the same command")
  assert commands.train(workdir).code == 0
  assert_same_run(workdir, whole)
  before = content(workdir)
  assert commands.train(workdir).code == 0
  assert content(workdir) == before


def test_a_second_ctrl_c_leaves_at_once(commands, tmp_path):
  outcome = commands.train(tmp_path / "run", fault="SIGINT+SIGINT@step:6")
  assert outcome.code == 130
  outcome.says_in_one_line("exited without saving")
  assert steps(tmp_path / "run") == [4]
  outcome = commands.train(tmp_path / "early", fault="SIGINT+SIGINT@step:2")
  assert outcome.code == 130
  outcome.says_in_one_line("nothing is saved yet", "starts from the beginning")


def test_a_run_is_told_that_its_data_changed(whole):
  with pytest.raises(UserError, match=r"the data changed: .* but embedded is now 0123"):
    check_data(whole, "embedded", "0123")
  environment = json.loads((whole / "config.json").read_text())["environment"]
  check_data(whole, "embedded", environment["data"])


@pytest.mark.full
def test_data_of_another_vocabulary_are_not_taken_for_another_model(commands, at_12):
  outcome = commands.train(at_12, data__vocab_size=400, allow_changed_keys=True)
  assert outcome.code == 1
  outcome.says_in_one_line("the data changed")


@pytest.mark.full
def test_ctrl_c_on_a_terminal_reaches_the_data_workers_too(commands, whole, tmp_path):
  workdir = tmp_path / "run"
  outcome = commands.train(workdir, fault="group:SIGINT@step:6", data__workers=1)
  assert outcome.code == 75, outcome.err
  outcome.says_in_one_line("the same command")
  assert commands.train(workdir).code == 0
  assert_same_run(workdir, whole)


@pytest.mark.full
@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_the_data_workers_of_a_killed_run_end(commands, tmp_path):
  words = [f"--config={CONFIG}", f"--config.workdir={tmp_path}/run", "--config.data.workers=1"]
  process = commands.start("train", *words, fault="SIGKILL@step:6")
  assert process.wait(timeout=240) == -signal.SIGKILL
  deadline = time.monotonic() + 20
  while members(process.pid) and time.monotonic() < deadline:
    time.sleep(0.2)
  if left := members(process.pid):
    os.killpg(process.pid, signal.SIGKILL)
  assert not left


def members(group: int) -> list[str]:
  """Living processes of a process group."""
  found = []
  for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      name, _, rest = stat.read_text().rpartition(") ")
      state_, _, pgrp = rest.split()[:3]
      if int(pgrp) == group and state_ != "Z":
        found.append(name)
  return found


@pytest.mark.full
def test_soak(cache):
  words = [sys.executable, "scripts/soak.py", "--kills=4", "--seed=1"]
  soak = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
  assert soak.returncode == 0, soak.stdout + soak.stderr
  assert "identical" in soak.stdout


def test_changed_keys(commands, at_12):
  outcome = commands.train(at_12, seed=7, opt__peak_learning_rate=0.02)
  assert outcome.code == 2
  outcome.says_in_one_line("seed: 42 -> 7", "opt.peak_learning_rate: 0.01 -> 0.02")
  assert steps(at_12) == [12]
  outcome = commands.train(
    at_12, opt__peak_learning_rate=0.02, allow_changed_keys=True, log_every_steps=3
  )
  assert outcome.code == 0, outcome.err
  config = json.loads((at_12 / "config.json").read_text())
  assert config["opt"]["peak_learning_rate"] == 0.02
  (change,) = config["environment"]["changes"]
  assert change["step"] == 12 and "opt.peak_learning_rate: 0.01 -> 0.02" in change["keys"]
  assert [s for s, name, _ in losses(at_12) if name == "train/loss"][-3:] == [12, 15, 16]


def test_keys_that_do_not_change_the_result_may_change(commands, whole, at_12):
  outcome = commands.train(
    at_12, checkpoint_every_steps=3, max_to_keep=1, tensorboard=False, profile_steps="14-15"
  )
  assert outcome.code == 0, outcome.err
  assert list(at_12.glob("profile/plugins/profile/*/*.trace.json.gz"))
  assert_same_run(at_12, whole)


@pytest.mark.full
def test_a_run_moves_between_device_counts(commands, whole, tmp_path):
  up = until_12(whole, tmp_path / "up")
  assert commands.train(up, devices=8).code == 0
  first = commands.train(tmp_path / "down", devices=8, fault="SIGTERM@step:6")
  assert first.code == 75, first.err
  assert commands.train(tmp_path / "down", devices=1).code == 0
  for workdir in (up, tmp_path / "down"):
    for (step, name, x), (*same, y) in zip(losses(workdir), losses(whole), strict=True):
      assert [step, name] == same
      assert x == pytest.approx(y, abs=1e-5)
    for path, x in state(whole, 16).items():
      np.testing.assert_allclose(state(workdir, 16)[path], x, atol=2e-4, err_msg=str(path))


@pytest.mark.full
def test_eval_depends_on_neither_batches_nor_devices(commands, whole, tmp_path):
  """The eval set and the loss of the first steps, whatever the eval batch and the devices."""
  expected = [x for s, name, x in losses(whole) if name == "eval/loss"]
  for number, (devices, eval_steps) in enumerate([(1, 64), (1, 1), (8, 2), (8, 16)]):
    workdir = tmp_path / str(number)
    outcome = commands.train(
      workdir, devices=devices, eval_steps=eval_steps, eval_batch_size=64 // eval_steps
    )
    assert outcome.code == 0, outcome.err
    found = [x for s, name, x in losses(workdir) if name == "eval/loss"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
