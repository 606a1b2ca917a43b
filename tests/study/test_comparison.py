import csv
import io
import json

import numpy as np
import pytest
from helpers.made_up_runs import ROWS, write_run

from nanosam import compare as command
from nanosam.optim.methods import METHODS
from nanosam.study import comparison, figures, paired, runs, tables
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import strict_json


def read(folder):
  return runs.find_runs([folder])[0]


def test_means_differences_and_intervals_of_known_numbers(tmp_path):
  for seed, (a, b) in enumerate([(3.50, 3.48), (3.60, 3.57), (3.55, 3.51)], 1):
    write_run(tmp_path, "adamw", seed, a)
    write_run(tmp_path, "sam", seed, b)
  report = comparison.compare(read(tmp_path))
  base, sam = report.groups
  assert (base.label, sam.label) == ("adamw", "sam")
  assert base.mean == pytest.approx(3.55) and base.deviation == pytest.approx(0.05)
  assert sam.difference.mean == pytest.approx(-0.03) and sam.difference.pairs == 3
  # sd of (-.02, -.03, -.04) is .01; t with 2 degrees of freedom is 4.3027
  half = 4.302653 * 0.01 / 3**0.5
  for name in ("seeds", "both"):  # all sequences alike: nothing to add
    interval = sam.difference.intervals[name]
    assert (interval.low, interval.high) == pytest.approx((-0.03 - half, -0.03 + half), abs=1e-6)
  assert sam.difference.intervals["both"].covers == paired.BOTH


@pytest.mark.parametrize("S", [2, 3, 5])
@pytest.mark.parametrize("seed_sd, unit_sd, rest_sd", [(0.01, 0.0, 0.02), (0.01, 0.1, 0.05)])
def test_the_interval_covers_the_truth_at_its_nominal_rate(S, seed_sd, unit_sd, rest_sd):
  rng = np.random.default_rng(0)
  R, trials, hits = 60, 2000, 0
  for _ in range(trials):
    x = rng.normal(0, seed_sd, (S, 1)) + rng.normal(0, unit_sd, (1, R))
    interval = paired.over_both(x + rng.normal(0, rest_sd, (S, R)) + 0.02, 0.9)
    hits += interval.low <= 0.02 <= interval.high
  assert 0.885 < hits / trials < 0.975  # it errs on the wide side


def test_the_interval_over_seeds_alone_misses_the_text_and_the_other_the_seeds():
  rng = np.random.default_rng(1)
  hits = {"seeds": 0, "units": 0}
  for _ in range(500):
    noise = rng.normal(0, 0.01, (3, 1)) + rng.normal(0, 0.2, (1, 60))
    x = noise + rng.normal(0, 0.01, (3, 60))
    hits["seeds"] += abs(x.mean()) < paired.over_seeds(x.mean(1), 0.9).high - x.mean()
    far = rng.normal(0, 0.2, (3, 1)) + rng.normal(0, 0.01, (3, 60))
    hits["units"] += abs(far.mean()) < paired.over_units(far, 0.9).high - far.mean()
  assert hits["seeds"] < 0.75 * 500 and hits["units"] < 0.3 * 500


def test_pairing_takes_out_what_both_share(tmp_path):
  rng = np.random.default_rng(2)
  for seed in (1, 2, 3):
    shared = 3.5 + rng.normal(0, 0.05) + rng.normal(0, 0.5, ROWS)
    write_run(tmp_path, "adamw", seed, seq=shared + rng.normal(0, 0.01, ROWS))
    write_run(tmp_path, "sam", seed, seq=shared - 0.02 + rng.normal(0, 0.01, ROWS))
  sam = comparison.compare(read(tmp_path)).group("sam")
  interval = sam.difference.intervals["both"]
  assert interval.low < -0.02 < interval.high
  assert interval.high - interval.low < 0.02 < sam.deviation


def test_units_are_stretches_of_sequences_and_keep_the_difference():
  rng = np.random.default_rng(3)
  weight = rng.integers(50, 100, 25).astype(float)
  difference = rng.normal(0, 1, (2, 25)) * weight
  x = paired.units(difference, weight, documents=10)
  assert x.shape == (2, 5)
  np.testing.assert_allclose(x.mean(1), difference.sum(1) / weight.sum())
  assert paired.units(difference, weight, documents=None).shape == (2, 25)


def test_the_best_setting_is_judged_on_common_seeds_and_the_edge_is_told(tmp_path):
  write_run(tmp_path, "adamw", 1, 3.5)
  for rho, losses in {0.1: [3.49, 3.3, 3.3], 0.2: [3.48], 0.4: [3.47]}.items():
    for seed, loss in enumerate(losses, 1):
      write_run(tmp_path, "sam", seed, loss, keys={"opt.rho": rho})
  report = comparison.compare(read(tmp_path), tune=["opt.rho"])
  assert report.group("sam").best.settings == {"opt.rho": 0.4}
  assert any("opt.rho=0.4 is the largest tried (0.1, 0.2, 0.4)" in n for n in report.notes)
  write_run(tmp_path, "sam", 1, 3.6, keys={"opt.rho": 0.8})
  notes = comparison.compare(read(tmp_path), tune=["opt.rho"]).notes
  assert not any("tried" in n for n in notes)


@pytest.mark.parametrize(
  "change, words",
  [
    ({"keys": {"opt.b2": 0.95}}, "opt.b2 is 0.98 in"),
    ({"keys": {"opt.num_train_steps": 600, "opt.warmup_steps": 60}}, "opt.num_train_steps"),
    ({"keys": {"opt.warmup_steps": 300}}, "opt.warmup_steps"),
    ({"env": {"data": "d2"}}, "different data: d1 and d2"),
    ({"env": {"eval_set": {"sequences": 7}}}, "different eval set"),
  ],
)
def test_refuses_what_differs_in_more_than_the_method(tmp_path, change, words):
  write_run(tmp_path, "adamw", 1)
  write_run(tmp_path, "sam", 1, **change)
  with pytest.raises(UsageError, match=words):
    comparison.compare(read(tmp_path))


def test_a_setting_that_one_method_lacks_does_not_hide_a_difference(tmp_path):
  write_run(tmp_path, "adamw", 1)
  write_run(tmp_path, "sam", 1)
  write_run(tmp_path, "precond_sam", 1, keys={"opt.rho": 0.3})
  with pytest.raises(UsageError, match=r"opt\.rho is 0\.[13]"):
    comparison.compare(read(tmp_path))
  assert len(comparison.compare(read(tmp_path), tune=["opt.rho"]).groups) == 3


def test_what_follows_a_compared_key_is_no_difference(tmp_path):
  write_run(tmp_path, "adamw", 1, 3.5)
  write_run(tmp_path, "adamw", 1, 3.6, keys={"opt.peak_learning_rate": 0.01})
  write_run(tmp_path, "adamw", 1, 3.4, keys={"opt.num_train_steps": 600, "opt.warmup_steps": 60})
  tune = ["opt.peak_learning_rate", "opt.num_train_steps"]
  assert comparison.compare(read(tmp_path), tune=tune).groups[0].mean == pytest.approx(3.4)


@pytest.mark.parametrize("steps, warmup", [(655, 66), (641, 64), (6, 1), (6, 0), (2400, 240)])
def test_a_warmup_in_proportion_follows_whatever_the_rounding(tmp_path, steps, warmup):
  write_run(tmp_path, "adamw", 1)  # 120 of 1200
  write_run(tmp_path, "sam", 1, keys={"opt.num_train_steps": steps, "opt.warmup_steps": warmup})
  assert len(comparison.compare(read(tmp_path), tune=["opt.num_train_steps"]).groups) == 2
  keys = {"opt.num_train_steps": 601, "opt.warmup_steps": 90}
  write_run(tmp_path, "func_sam", 1, keys=keys)
  with pytest.raises(UsageError, match=r"opt\.warmup_steps"):
    comparison.compare(read(tmp_path), tune=["opt.num_train_steps"])


def test_half_written_diverged_and_damaged_runs_each_have_a_line(tmp_path):
  good = write_run(tmp_path, "adamw", 1)
  half = write_run(tmp_path, "adamw", 2, curve={300: 4.0, 400: 3.9})
  bad = write_run(tmp_path, "sam", 1)
  with open(bad / "metrics.jsonl", "w") as f:
    f.write(json.dumps({"step": 70, "train/loss": "NaN", "guard/nonfinite": 1}) + "\n")
  skipped = write_run(tmp_path, "sam", 3, keys={"guard.policy": "skip", "guard.max_skips": 2})
  with open(skipped / "metrics.jsonl", "w") as f:
    f.write(json.dumps({"step": 80, "train/loss": "NaN", "guard/nonfinite": 3}) + "\n")
  torn = write_run(tmp_path, "sam", 2)
  (torn / "eval_sequences.npz").write_bytes(b"PK")
  (tmp_path / "begun").mkdir()
  (tmp_path / "begun" / "metrics.jsonl").write_text("")
  found, notes = runs.find_runs([tmp_path, good])
  assert {r.path: r.state for r in found} == {
    good: runs.FINISHED,
    half: runs.UNFINISHED,
    bad: runs.DIVERGED,
    skipped: runs.DIVERGED,
  }
  text = "\n".join(notes)
  for words in (
    f"{half}: unfinished at step 400 of 1200",
    f"{bad}: diverged at step 70 of 1200",
    "eval_sequences.npz is damaged",
    "begun holds no run",
  ):
    assert words in text
  report = comparison.compare([r for r in found if r.path != skipped])
  assert report.group("sam").mean == np.inf and report.group("sam").difference is None
  json.dumps(strict_json(report.to_json()), allow_nan=False)


def test_one_run_in_two_places_is_refused(tmp_path):
  write_run(tmp_path / "a", "sam", 1)
  write_run(tmp_path / "b", "sam", 1)
  with pytest.raises(UserError, match="are one run"):
    runs.find_runs([tmp_path / "a", tmp_path / "b"])


def test_why_there_is_nothing_to_compare(tmp_path):
  run = write_run(tmp_path, "adamw", 1)
  sequences = run / "eval_sequences.npz"
  for content in (b"", b"PK", sequences.read_bytes()[:-40]):
    sequences.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged .*nanosam\.evaluate .* --save"):
      command.main(["compare", str(tmp_path)])
  sequences.unlink()
  with pytest.raises(UserError, match=r"not of the last step: .* --save"):
    command.main(["compare", str(tmp_path)])


def test_a_view_that_some_record_lacks(tmp_path):
  run = write_run(tmp_path, "adamw", 1)
  lines = (run / "metrics.jsonl").read_text().splitlines()
  records = [{k: v for k, v in json.loads(x).items() if k != "compute"} for x in lines]
  (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  assert comparison.compare(read(tmp_path))
  with pytest.raises(UserError, match="without 'compute'"):
    comparison.compare(read(tmp_path), view="compute")


def test_missing_seeds_are_named(tmp_path):
  for seed in (1, 2):
    write_run(tmp_path, "adamw", seed)
  write_run(tmp_path, "sam", 1)
  write_run(tmp_path, "func_sam", 3)
  report = comparison.compare(read(tmp_path))
  assert any("sam has no run with (seed, data_seed) (2, 2)" in n for n in report.notes)
  assert any("func_sam and adamw share no seed" in n for n in report.notes)
  assert report.group("sam").difference.intervals.keys() == {"units"}


def test_views_at_equal_compute_and_time_read_the_curves(tmp_path):
  write_run(tmp_path, "adamw", 1, curve={600: 3.6, 1200: 3.5})
  write_run(tmp_path, "sam", 1, curve={300: 4.0, 600: 3.8, 1200: 3.4})
  found = read(tmp_path)
  assert comparison.compare(found).group("sam").difference.mean == pytest.approx(-0.1)
  for view, budget in (("compute", 1200), ("time", 3600)):
    report = comparison.compare(found, view=view)
    assert report.budget == budget
    assert report.group("sam").mean == pytest.approx(3.8)  # half of its steps
    assert any("1 of 2 runs are read before their end" in n for n in report.notes)


def test_steps_to_target(tmp_path):
  write_run(tmp_path, "adamw", 1, curve={600: 4.0, 1200: 3.5})
  write_run(tmp_path, "sam", 1, curve={600: 3.7, 1200: 3.3})
  write_run(tmp_path, "func_sam", 1, curve={600: 3.7, 1200: 3.6})
  report = comparison.compare(read(tmp_path))
  assert report.group("adamw").to_target == 1200
  assert report.group("sam").to_target == pytest.approx(900)
  assert report.group("func_sam").to_target is None


def test_steps_to_target_are_read_off_the_mean_curve(tmp_path):
  """Of several seeds one at least ends above their mean."""
  for seed, shift in ((1, 0.1), (2, -0.1)):
    write_run(tmp_path, "adamw", seed, curve={600: 4.0 + shift, 1200: 3.5 + shift})
    write_run(tmp_path, "sam", seed, curve={600: 3.7 + shift, 1200: 3.3 + shift})
  report = comparison.compare(read(tmp_path))
  assert report.group("adamw").to_target == pytest.approx(1200)
  assert report.group("sam").to_target == pytest.approx(900)


def test_a_method_that_diverges_on_a_seed_has_no_mean_over_the_others(tmp_path):
  for seed in (1, 2):
    write_run(tmp_path, "adamw", seed, 3.5)
  write_run(tmp_path, "sam", 1, 3.4)
  bad = write_run(tmp_path, "sam", 2)
  (bad / "metrics.jsonl").write_text('{"step": 70, "train/loss": "NaN", "guard/nonfinite": 1}\n')
  report = comparison.compare(read(tmp_path))
  assert report.group("sam").difference is None and report.group("sam").mean == np.inf
  assert any("not all of those finished" in n for n in report.notes)


def test_values_that_look_alike_are_not_one_setting(tmp_path):
  write_run(tmp_path, "adamw", 1)
  for phi, loss in ((0.7853981633974483, 3.4), (0.785398, 3.6)):
    write_run(tmp_path, "angle_sam", 1, loss, keys={"opt.phi": phi})
  report = comparison.compare(read(tmp_path), tune=["opt.phi"])
  assert sorted(c.mean() for c in report.group("angle_sam").cells) == pytest.approx([3.4, 3.6])
  by = comparison.compare(read(tmp_path), by=["opt.method", "opt.phi"], baseline="adamw, -")
  assert len(by.groups) == 3


def test_two_runs_of_one_seed_that_differ_in_nothing_that_is_compared(tmp_path):
  write_run(tmp_path, "adamw", 1)
  for every in (100, 500):
    write_run(tmp_path, "sam", 1, keys={"eval_every_steps": every})
  with pytest.raises(UsageError, match="only one of them can count"):
    comparison.compare(read(tmp_path))


def test_a_run_that_went_on_under_other_settings_is_told(tmp_path):
  changes = [{"step": 70, "keys": ["opt.rho: 0.1 -> 0.2"], "git_commit": None}]
  write_run(tmp_path, "adamw", 1)
  write_run(tmp_path, "sam", 1, env={"changes": changes})
  notes = comparison.compare(read(tmp_path)).notes
  assert any("until step 70" in n and "opt.rho: 0.1 -> 0.2" in n for n in notes)


def continued(seed, origin="base"):
  origin = f"runs/{origin}-{seed}"
  facts = {"workdir": origin, "step": 900, "parameters": f"{seed:016x}"}
  return {"keys": {"init_from": f"{origin}@best"}, "env": {"init_from": facts}}


def test_what_runs_started_from_is_named(tmp_path):
  """Those of one seed from the same checkpoint, those of another seed from another one."""
  for seed in (1, 2):
    for method in ("adamw", "sam"):
      write_run(tmp_path, method, seed, **continued(seed))
  report = comparison.compare(read(tmp_path))
  assert report.group("sam").difference.pairs == 2
  named = [n for n in report.notes if "started from runs/base-2, step 900, parameters 000" in n]
  assert len(named) == 2
  write_run(tmp_path, "func_sam", 2, **continued(2, "other"))
  with pytest.raises(UsageError, match=r"init_from is runs/(base|other)-2, step 900, parameters"):
    comparison.compare(read(tmp_path))


def test_a_start_from_nothing_is_another_one(tmp_path):
  write_run(tmp_path, "adamw", 1)
  write_run(tmp_path, "sam", 2, **continued(2))
  with pytest.raises(UsageError, match=r"init_from is .*runs/base-2, step 900"):
    comparison.compare(read(tmp_path))


def test_a_run_inside_a_workdir_belongs_to_it(tmp_path):
  outer = write_run(tmp_path, "adamw", 1)
  inner = write_run(outer / "finetuned", "adamw", 1, keys={"opt.weight_decay": 0.0})
  assert [run.path for run in read(tmp_path)] == [outer]
  assert [run.path for run in read(inner)] == [inner]


def test_the_command(tmp_path, capsys):
  for seed in (1, 2):
    write_run(tmp_path, "adamw", seed, 3.5)
    write_run(tmp_path, "sam", seed, 3.4)
  command.main(["compare", str(tmp_path), "--tune=opt.rho", "--json"])
  groups = json.loads(capsys.readouterr().out)["groups"]
  assert [g["label"] for g in groups] == ["adamw", "sam"] and groups[1]["pairs"] == 2
  command.main(["compare", str(tmp_path), "--baseline=sam"])
  text = capsys.readouterr().out
  assert "+0.1000" in text and "the interval covers other seeds" in text
  with pytest.raises(UsageError, match=r"did you mean opt\.method"):
    command.main(["compare", str(tmp_path), "--by=opt.methd"])
  with pytest.raises(UserError, match="no finished run"):
    (tmp_path / "empty").mkdir()
    command.main(["compare", str(tmp_path / "empty")])


def test_a_baseline_that_no_run_has_is_refused_and_the_usual_one_is_not_needed(tmp_path, capsys):
  write_run(tmp_path, "sam", 1)
  write_run(tmp_path, "asam", 1)
  with pytest.raises(UsageError, match="no group is --baseline=sgd: known: asam, sam"):
    command.main(["compare", str(tmp_path), "--baseline=sgd"])
  command.main(["compare", str(tmp_path)])
  assert "there is no baseline 'adamw'" in capsys.readouterr().out


def test_by_rho_as_the_message_recommends(tmp_path, capsys):
  write_run(tmp_path, "adamw", 1, 3.5)
  for rho in (0.1, 0.3):
    write_run(tmp_path, "sam", 1, 3.4, keys={"opt.rho": rho})
  with pytest.raises(UsageError, match=r"--by=\.\.\.,opt\.rho"):
    command.main(["compare", str(tmp_path)])
  command.main(["compare", str(tmp_path), "--by=opt.method,opt.rho", "--json"])
  found = json.loads(capsys.readouterr().out)
  assert found["baseline"] == "adamw"
  assert [g["label"] for g in found["groups"]] == ["adamw", "sam, 0.1", "sam, 0.3"]
  assert found["groups"][1]["difference"] == pytest.approx(-0.1)
  command.main(["compare", str(tmp_path), "--by=opt.method,opt.rho", "--baseline=sam, 0.3"])
  assert "minus sam, 0.3" in capsys.readouterr().out
  with pytest.raises(UsageError, match=r"is 2 groups: choose one, such as --baseline='sam, 0\.1'"):
    command.main(["compare", str(tmp_path), "--by=opt.method,opt.rho", "--baseline=sam"])


def test_rows_say_what_the_interval_covers_and_what_to_beware_of(tmp_path, capsys):
  for rho in (0.1, 0.3):
    write_run(tmp_path, "sam", 1, 3.4 + rho, keys={"opt.rho": rho})
  write_run(tmp_path, "adamw", 1, 3.5)
  write_run(tmp_path, "func_sam", 2, 3.5)
  command.main(["compare", str(tmp_path), "--tune=opt.rho", "--confidence=0.9", "--format=csv"])
  rows = {row["method"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
  sam, func = rows["sam"], rows["func_sam"]
  assert sam["covers"] == "other text only" and sam["90 % interval"] and sam["seeds"] == "1"
  assert "rho at the edge of its grid" in sam["beware"] and "missing seeds" in func["beware"]
  assert func["covers"] == func["90 % interval"] == ""


def test_tables_as_latex_and_csv():
  table = tables.Table(["method", "50 % of λ"], [["func_sam", "-0.1"], ["a & b", "1e-05"]])
  assert tables.csv_lines(table) == ["method,50 % of λ", "func_sam,-0.1", "a & b,1e-05"]
  assert tables.latex(table) == [
    r"\begin{tabular}{lr}",
    r"\toprule",
    r"method & 50 \% of $\lambda$ \\",
    r"\midrule",
    r"func\_sam & $-$0.1 \\",
    r"a \& b & 1e-05 \\",
    r"\bottomrule",
    r"\end{tabular}",
  ]


def test_every_method_has_a_look_of_its_own():
  names = [*METHODS, *(f"mine_{i}" for i in range(12))]
  styles = figures.styles_of(names)
  assert len(set(styles.values())) == len(names)
  yours = figures.styles_of(["adamw", "mine", "other"])
  assert len({colour for colour, _ in yours.values()}) == 3
  assert yours["adamw"] == figures.STYLES["adamw"]


def weighted(folder, name, seed, loss, flops, value="a1", **more):
  env = {"weights": {"hash": value, "flops": {"proxy": flops, "scoring": flops}}}
  write_run(folder, "adamw", seed, loss, keys={"data.weights": name, **more}, env=env)


def test_runs_by_weights_pay_for_their_proxy(tmp_path, capsys):
  for seed in (1, 2, 3):
    write_run(tmp_path, "adamw", seed, 3.5 + seed / 100)
    weighted(tmp_path, "hard.npz", seed, 3.4 + seed / 100 + seed / 1000, flops=60)
  command.main(["compare", str(tmp_path), "--by=data.weights", "--json"])
  found = json.loads(capsys.readouterr().out)
  none, hard = found["groups"]
  assert (none["label"], hard["label"]) == ("none", "hard.npz")
  assert hard["difference"] == pytest.approx(-0.098) and hard["pairs"] == 3
  assert (none["compute"], hard["compute"]) == (1200, 1320)
  assert any("has spent 120 FLOPs more than its steps" in note for note in found["notes"])
  command.main(["compare", str(tmp_path), "--by=data.weights", "--view=compute", "--json"])
  none, hard = json.loads(capsys.readouterr().out)["groups"]
  # Curves fall by 1 from step 600 to 1200; the weighted runs are read at 1080 of 1200 steps.
  assert hard["loss"] == pytest.approx(3.4 + 0.022 + 120 / 600)
  assert none["loss"] == pytest.approx(3.52)


def test_runs_of_other_lengths_must_cost_the_same(tmp_path):
  def notes(steps, flops, folder):
    write_run(folder, "adamw", 1, 3.5)
    weighted(folder, "hard.npz", 1, 3.4, flops, **{"opt.num_train_steps": steps})
    tune = ("opt.num_train_steps", "opt.warmup_steps", "eval_every_steps")
    report = comparison.compare(read(folder), by=("data.weights",), tune=tune, baseline="none")
    return [n for n in report.notes if "neither equal steps nor equal compute" in n]

  assert notes(1000, 100, tmp_path / "equal") == []
  assert len(notes(1000, 10, tmp_path / "other")) == 1


def test_weights_of_one_name_and_two_contents_do_not_compare(tmp_path):
  for seed in (1, 2):
    weighted(tmp_path, "hard.npz", seed, 3.4, 1, value=f"a{seed}")
  with pytest.raises(UsageError, match=r"one name of weights, hard.npz, and two contents: a1"):
    comparison.compare(read(tmp_path), by=("data.weights",), baseline="none")


def test_weights_are_a_difference_like_any_other(tmp_path):
  write_run(tmp_path, "sam", 1, 3.5)
  weighted(tmp_path, "hard.npz", 1, 3.4, 1)
  with pytest.raises(UsageError, match=r"data.weights is .*hard.npz"):
    comparison.compare(read(tmp_path))
