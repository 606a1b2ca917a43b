"""What --dry_run says is what a run is."""

import json

import jax
import pytest
from helpers.training import CONFIG

from nanosam import config as config_lib
from nanosam import train
from nanosam.run import dry_run
from nanosam.system.errors import UserError


@pytest.fixture
def config(cache, tmp_path):
  c = config_lib.load(str(CONFIG))
  c.workdir = str(tmp_path / "run")
  return c


def test_the_facts_are_those_of_the_run(whole, cache):
  stored = json.loads((whole / "config.json").read_text())
  environment = stored.pop("environment")
  c = config_lib.load(str(CONFIG))
  c.workdir = str(whole)
  facts = dry_run.facts(c)
  assert facts["config"] == stored
  assert facts["parameters"] == environment["parameters"]
  assert facts["non_embedding_parameters"] == environment["non_embedding_parameters"]
  assert facts["flops_per_step"] == environment["flops_per_step"]
  last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-2])
  assert facts["tokens"] == last["tokens"] == facts["steps"] * 8 * 32
  assert facts["epochs"] == pytest.approx(last["data/epoch"])
  assert facts["flops"] == last["compute"]
  assert facts["resumes_at"] == 16
  parameters = 4 * facts["parameters"]
  assert facts["bytes"]["parameters"] == facts["bytes"]["gradient"] == parameters
  assert 2 * parameters < facts["bytes"]["optimizer"] < 2 * parameters + 100
  assert facts["checkpoint_bytes"] == pytest.approx(3 * parameters, abs=200)
  assert f"{facts['parameters']:,}" in dry_run.describe(facts)


def test_it_writes_nothing(config, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(jax.config, "update", lambda *_: None)  # this process has its devices
  train.main(["", f"--config={CONFIG}", f"--config.workdir={config.workdir}", "--dry_run"])
  said = capsys.readouterr().out
  assert "opt.method=" in said and said.endswith("(--dry_run)\n")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("model.H", 3, "not divisible by model.H=3"),
    ("data.source", "tokens:nowhere", "nowhere is not a complete token store"),
    ("data.source", "digits", "holds images"),
    ("init_from", "nowhere", "nowhere holds no run"),
    ("opt.num_train_steps", 10**9, "but 1000000000 steps"),
  ],
)
def test_what_a_run_would_refuse_is_refused(config, key, value, message):
  config.data.repeat = False
  config_lib.override(config, key, str(value))
  with pytest.raises(UserError, match=message):
    dry_run.check(config)


def test_a_workdir_of_other_settings_is_refused(whole, config):
  config.workdir, config.seed = str(whole), 7
  with pytest.raises(UserError, match="holds a run with other settings"):
    dry_run.check(config)
