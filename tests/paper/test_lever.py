"""The data lever's runs and report, with made-up losses; its parts are tested where they are."""

import json
import math

import numpy as np
import pytest
from etils import epath
from helpers.made_up_runs import write_run
from helpers.scripts import load_script

from nanosam.data.weights import Extra, Weights
from nanosam.paper import regimes
from nanosam.paper.lever import report, study
from nanosam.paper.lever.study import ARMS, RECIPES, Arm, Lever, Settings, changed
from nanosam.paper.protocol import PEAK
from nanosam.system.errors import UsageError, UserError

reproduce = load_script("scripts/reproduce.py")
EFFECT = {"hard": -0.03, "easy": 0.02, "": 0.0}
FLOPS = 1e9


@pytest.fixture
def lever(tmp_path, monkeypatch):
  monkeypatch.setattr(study, "step_flops", lambda c, outputs: 1e8)

  class Known:
    outputs = 1024

  monkeypatch.setattr(study, "source_of", lambda data, name: Known)
  made = Lever(tmp_path, "tokens:wiki", "tokens:other", seeds=3)
  for number, name in enumerate(RECIPES):
    made.file(name).parent.mkdir(exist_ok=True)
    copies = np.ones(9, np.uint8)
    copies[number] = 2
    cluster = {"documents": 3, "tokens": 30, "losses": [5.0]}
    facts = {"store": "s", "feature": "last", "choose": "hard", "copies": 2, "steps": [22, 110]}
    facts |= {"flops": {"proxy": FLOPS, "scoring": FLOPS}, "chosen": cluster}
    facts |= {"clusters": {"hard": cluster, "easy": cluster}}
    Weights(copies, copies > 1, Extra.of([]), facts).save(epath.Path(made.file(name)))
  return made


def loss(lever, job):
  names = {str(lever.file(name)): name for name in RECIPES}
  effect = EFFECT.get(names.get(job.config.data.weights, ""), 0.01)
  rate = abs(math.log(job.config.opt.peak_learning_rate / 0.006))  # at the edge of the first grid
  return 4 + effect + rate + 0.001 * job.config.seed * (1 + 10 * abs(effect))


def fill(lever, jobs):
  for job in jobs:
    if not job.stored():
      c = job.config
      env = {}
      if c.data.weights:
        env = {"weights": {"hash": c.data.weights, "flops": {"proxy": FLOPS, "scoring": FLOPS}}}
      keys = {**job.overrides, "seed": c.seed}
      folder, method = job.workdir.parent, c.opt.method
      write_run(folder, method, c.seed, loss(lever, job), keys, env=env, spec=job.spec)


def tune(lever):
  for _ in range(10):
    jobs = lever.jobs("tuning")
    if all(job.stored() for job in jobs):
      return
    fill(lever, jobs)


def test_every_arm_is_tuned_and_then_compared_on_fresh_seeds(lever, capsys):
  tune(lever)
  assert {lever.trials(arm)[1][PEAK] for arm in ARMS} == {0.006}  # the grid was extended
  assert {len(lever.trials(arm)[0]) for arm in ARMS} == {4}
  jobs = lever.jobs("verdict")
  assert len(jobs) == len({j.id for j in jobs}) == 3 * len(ARMS)
  assert {j.config.seed for j in jobs} == {1, 2, 3}
  fill(lever, jobs)
  shorter = lever.jobs("compute")
  assert {j.config.opt.num_train_steps for j in shorter} == {1000 - 20}  # 2e9 of 1e8 a step
  assert all(j.config.data.weights for j in shorter)
  fill(lever, shorter)
  for job in jobs:
    value = 3 + EFFECT.get(job.config.data.weights and "hard", 0) * job.config.seed
    found = {"hard": value, "easy": 4.0, "other": 5.0}
    (job.workdir / report.MEASURED).write_text(json.dumps(found))
  report.write_report(lever, ["reproduce.py", "lever"])
  results = json.loads((lever.out / "results.json").read_text())
  for optimizer, arms in (("adamw", 9), ("muon", 3), ("precond_func_sam", 3)):
    groups = {g["label"]: g for g in results[optimizer]["verdict"]["groups"]}
    assert len(groups) == arms
    assert groups["hard"]["difference"] == pytest.approx(-0.03 + 0.002 * 0.3)
    assert groups["hard"]["pairs"] == 3
    assert len(results[optimizer]["compute"]["groups"]) == arms
    hard = results[optimizer]["measured"]["hard"]["hard"]
    assert hard["difference"] == pytest.approx(-0.06) and hard["interval"]["low"] < -0.06
    assert results[optimizer]["measured"]["hard"]["easy"]["difference"] == 0
  text = (lever.out / "table.md").read_text()
  assert "-0.0600 (-0.1345 to +0.0145)" in text  # t of 2 degrees: 4.303 * 0.03 / sqrt(3)
  assert text.count("-s11-") == 4 * len(ARMS)  # every trial is reported
  assert "hard, 15 checkpoints" in text and "equal compute, proxy and scoring included" in text


def test_proxies_keep_the_checkpoints_that_weights_ask_for(lever):
  small, equal = lever.jobs("proxy")
  assert (small.config.model.D, equal.config.model.D) == (32, 64)
  c = small.config
  assert c.opt.num_train_steps == 15 * c.checkpoint_every_steps and c.max_to_keep >= 15
  assert c.seed not in (*lever.fresh_seeds, 11)
  tokens = c.opt.num_train_steps * c.batch_size * c.model.L
  assert 1.3e6 < tokens < 1.4e6  # one epoch, and the target three
  assert 2.9 < lever.job(Arm("adamw"), {}, 1).tokens / tokens < 3.1


def test_weights_need_their_proxy_and_the_verdict_its_tuning(lever):
  lever.file("easy").unlink()
  with pytest.raises(UserError, match="is not trained yet: run --stage=proxy first"):
    study.make_weights(lever, print)
  with pytest.raises(UserError, match="run --stage=tuning first"):
    regimes.train(lever, "verdict", "local", 1, [])


def test_weights_that_cost_more_than_the_run_leave_nothing(lever, monkeypatch):
  assert lever.paid(Arm("adamw", "hard")) == 20 and lever.length(Arm("adamw", "hard"))
  monkeypatch.setattr(study, "step_flops", lambda c, outputs: 1e6)
  assert lever.paid(Arm("adamw", "hard")) == 2000 and not lever.length(Arm("adamw", "hard"))
  monkeypatch.setattr(study, "ARMS", (Arm("adamw"), Arm("adamw", "hard")))
  tune(lever)
  assert lever.jobs("compute") == [] and lever.verdict("adamw", "compute") is None


def test_settings_are_changed_by_name():
  assert changed(["steps=50", "rho=0.1"]) == Settings(steps=50, rho=0.1)
  for pair, said in {"stesp=5": "did you mean steps", "steps=x": "is a number"}.items():
    with pytest.raises(UsageError, match=said):
      changed([pair])
  with pytest.raises(UsageError, match="proxy_steps must be 15"):
    changed(["proxy_steps=3"])


def test_the_command_says_what_it_would_run(tmp_path, capsys):
  words = ["--source=tokens:wiki", "--other=tokens:x", f"--out={tmp_path}", "--seeds=2"]
  reproduce.main(["reproduce.py", "lever", *words, "--stage=tuning", "--dry_run"])
  assert capsys.readouterr().out.count("not started") == 3 * len(ARMS)
