import json
import math

import pytest
from helpers.made_up_runs import write_run
from helpers.scripts import load_script
from scipy import stats

from nanosam.paper import regimes
from nanosam.paper.protocol import DECAY, PEAK, RHO
from nanosam.paper.regimes import ARMS, REGIMES, Axis, Study, search
from nanosam.study import paired
from nanosam.system.errors import UserError

reproduce = load_script("scripts/reproduce.py")
AXES = (Axis("x", (1, 2, 4, 8), 2), Axis("y", (0.5, 1, 2), 2, relative=True))


def bowl(x, y):
  """A loss with its minimum at (x, y)."""
  return lambda p: abs(math.log(p["x"] / x)) + abs(math.log(p["y"] / y))


def test_a_search_ends_at_the_minimum_of_its_coordinates():
  tried, best = search(AXES, {"x": 1, "y": 3}, bowl(4, 3))
  assert best == {"x": 4, "y": 3}
  assert [p["x"] for p in tried] == [1, 2, 4, 8, 4, 4]
  assert sorted(p["y"] for p in tried[3:]) == [1.5, 3, 6]


@pytest.mark.parametrize("x", [0.25, 32])
def test_a_best_value_at_the_edge_extends_the_grid(x):
  tried, best = search(AXES, {"x": 1, "y": 3}, bowl(x, 3))
  assert best["x"] == x
  assert {x / 2, x, 2 * x} <= {p["x"] for p in tried}


def test_a_search_asks_for_a_grid_at_a_time_and_is_resumed_by_its_losses():
  known = {}
  rounds = []
  for _ in range(10):
    tried, best = search(AXES, {"x": 1, "y": 3}, lambda p: known.get(tuple(p.values())))
    missing = [p for p in tried if tuple(p.values()) not in known]
    if not missing:
      break
    rounds.append(len(missing))
    known.update((tuple(p.values()), bowl(2, 6)(p)) for p in missing)
  assert rounds == [4, 2, 1] and best == {"x": 2, "y": 6}


def test_diverged_runs_lose():
  loss = bowl(8, 3)
  _, best = search(AXES, {"x": 1, "y": 3}, lambda p: math.inf if p["x"] > 4 else loss(p))
  assert best["x"] == 4


@pytest.fixture
def study(tmp_path, monkeypatch):
  monkeypatch.setattr(Study, "length", lambda self, arm: {"opt.num_train_steps": 500})
  return Study("limited", tmp_path, "tokens:wiki", seeds=11)


def fill(jobs, loss):
  for job in jobs:
    if not job.stored():
      keys = {**job.overrides, "seed": job.config.seed}
      method = job.config.opt.method
      write_run(job.workdir.parent, method, job.config.seed, loss(job), keys, spec=job.spec)


def loss(job):
  o = job.config.opt
  value = 4 + abs(math.log(o.weight_decay / 0.3)) + abs(math.log(o.peak_learning_rate / 0.012))
  if o.method != "adamw":
    value += 0.1 * abs(math.log(o.rho / 0.123)) - 0.02 * (o.momentum_sign < 0)
  return value + 0.001 * job.config.seed * (1 + 0.1 * len(o.method))


def tune(study):
  for _ in range(20):
    jobs = study.jobs("tuning")
    if all(job.stored() for job in jobs):
      return
    fill(jobs, loss)


def test_every_method_is_tuned_with_as_many_trials(study):
  tune(study)
  trials = {arm.label: study.trials(arm) for arm in ARMS}
  assert {len(jobs) for jobs, _ in trials.values()} == {8}
  points = [best for _, best in trials.values()]
  assert points[0] == {PEAK: 0.012, DECAY: 0.3}
  assert all(p == {PEAK: 0.012, DECAY: 0.3, RHO: 0.123} for p in points[1:])
  ids = {job.id for jobs, _ in trials.values() for job in jobs}
  assert len(ids) == 8 * len(ARMS) and {job.config.seed for job in study.jobs("tuning")} == {11}


def test_the_verdict_has_fresh_seeds_shared_by_all(study, capsys):
  tune(study)
  jobs = study.jobs("verdict")
  seeds = [*range(1, 11), 12]  # 11 was tuned on
  for arm in ARMS:
    assert [j.config.seed for j in jobs if j.spec == study.spec(arm.method)][
      :: 2 if "," in arm.label else 1
    ] == seeds
  fill(jobs, loss)
  fill(study.jobs("compute"), lambda job: loss(job) + 0.2)
  regimes.write_report(study, ["reproduce.py", "regimes"])
  results = json.loads((study.out / "limited" / "results.json").read_text())
  found = {g["label"]: g for g in results["verdict"]["groups"]}
  assert set(found) == {arm.label for arm in ARMS}
  gap = found["momentum_func_sam, back"]["loss"] - found["momentum_func_sam, ahead"]["loss"]
  assert gap == pytest.approx(-0.02)
  sam = found["sam"]
  assert sam["pairs"] == 11 and sam["difference"] == pytest.approx(-0.0002 * sum(seeds) / 11)
  assert results["power"]["sam"] > 0
  later = {g["label"]: g["difference"] for g in results["compute"]["groups"]}
  assert later["sam"] == pytest.approx(sam["difference"] + 0.2)
  text = (study.out / "limited" / "table.md").read_text()
  assert "Equal steps, fresh seeds" in text and "momentum_func_sam, back" in text
  assert text.count("-s11-") == 8 * len(ARMS)  # every trial is reported


def test_a_verdict_needs_the_tuning_first(study):
  with pytest.raises(UserError, match="run --stage=tuning first"):
    regimes.train(study, "verdict", "local", 1, [])


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_are_of_the_length_they_say(regime, tmp_path):
  study = Study(regime, tmp_path, "tokens:wiki", seeds=1)
  jobs = study.jobs("pilot")
  assert len(jobs) == 6 and len({job.config.opt.method for job in jobs}) == 2
  parameters = {64: 168_256, 32: 59_520}[jobs[0].config.model.D]
  ratio = jobs[0].tokens / parameters
  low, high = {"limited": (20, 30), "online": (110, 125), "overtrained": (490, 510)}[regime]
  assert low < ratio < high


def test_the_detectable_difference_is_found_four_times_in_five():
  deviation, pairs = 0.0075, 18
  effect = paired.detectable(deviation, pairs)
  # Exactly: a noncentral t beyond the quantile. The formula uses a central one, which is close.
  shift = effect / deviation * math.sqrt(pairs)
  critical = stats.t.ppf(0.975, pairs - 1)
  assert stats.nct.sf(critical, pairs - 1, shift) == pytest.approx(0.8, abs=0.01)


def test_the_command_says_what_it_would_run(tmp_path, capsys):
  words = ["--regime=online", "--source=tokens:wiki", f"--out={tmp_path}", "--seeds=2"]
  reproduce.main(["reproduce.py", "regimes", *words, "--stage=pilot", "--dry_run"])
  assert capsys.readouterr().out.count("not started") == 6
