"""A run that starts from a checkpoint of another."""

import json
import signal

import numpy as np
import pytest
from helpers.training import assert_same_run, state, steps

STILL = {"opt__peak_learning_rate": 0.0, "opt__num_train_steps": 1, "opt__warmup_steps": 0}


def lineage(workdir):
  return json.loads((workdir / "config.json").read_text())["environment"]["init_from"]


def parameters(workdir, step):
  return {k: x for k, x in state(workdir, step).items() if k[0] == "params"}


def equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_parameters_of_a_step_and_where_they_come_from(commands, whole, tmp_path):
  workdir = tmp_path / "run"
  outcome = commands.train(workdir, init_from=f"{whole}@12", seed=7, **STILL)
  assert outcome.code == 0, outcome.err
  assert equal(parameters(workdir, 1), parameters(whole, 12))
  assert lineage(workdir).items() >= {"workdir": str(whole), "step": 12}.items()
  assert len(lineage(workdir)["parameters"]) == 16


@pytest.mark.full
def test_moments_too_but_not_the_schedule(commands, whole, tmp_path):
  workdir, still = tmp_path / "run", {**STILL, "opt__b1": 1 - 1e-9, "opt__b2": 1 - 1e-9}
  commands.train(workdir, init_from=whole, init_optimizer=True, allow_changed_keys=True, **still)
  old, new = state(whole, 16), state(workdir, 1)
  counts = {k: (old[k], new[k]) for k in old if k[-1] == "count"}
  assert sorted(map(tuple, np.array([*counts.values()]))) == [(16, 1), (16, 17)]
  moments = [k for k in old if {"mu", "nu"} & set(k)]
  assert len(moments) > 10
  for k in moments:
    np.testing.assert_allclose(new[k], old[k], rtol=1e-4, atol=1e-7)


@pytest.mark.full
def test_it_resumes_like_any_other_run(commands, whole, tmp_path):
  straight, killed = tmp_path / "straight", tmp_path / "killed"
  settings = {"init_from": f"{whole}@best", "opt__method": "sam", "data_seed": 5}
  assert commands.train(straight, **settings).code == 0
  assert commands.train(killed, fault="SIGKILL@step:11", **settings).code == -signal.SIGKILL
  assert commands.train(killed, **settings).code == 0
  assert_same_run(killed, straight)
  assert lineage(killed) == lineage(straight)
  assert steps(straight)[-1] == 16


@pytest.mark.full
@pytest.mark.parametrize(
  "settings, said",
  [
    ({"model__D": 32}, ("model.D is 16 there and 32 here", "model.F is 64 there and 128 here")),
    ({"model__tied": False}, ("model.tied is True there and False here",)),
    ({"data__vocab_size": 600}, ("another vocabulary", "tokenizer")),
    ({"opt__base": "lion", "init_optimizer": True}, ("another optimizer", "init_optimizer=False")),
    ({"init_from": "nowhere"}, ("nowhere holds no run",)),
    ({"init_from": "{whole}@13"}, ("no checkpoint 13", "12, 16")),
  ],
)
def test_what_does_not_fit_is_named(commands, whole, tmp_path, settings, said):
  settings = {"init_from": str(whole), **settings}
  settings["init_from"] = settings["init_from"].format(whole=whole)
  outcome = commands.train(tmp_path / "run", **settings)
  assert outcome.code in (1, 2)
  outcome.says_in_one_line(*said)
