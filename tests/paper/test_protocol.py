import json

import pytest
from helpers.drawn import read_figure
from helpers.lab import BEST, BEST_RHO, lab, loss
from helpers.made_up_runs import write_run
from helpers.scripts import load_script
from helpers.training import ROOT

from nanosam import config as config_lib
from nanosam.paper import findings, protocol, published
from nanosam.paper.experiments import EXPERIMENTS
from nanosam.system.errors import UsageError, UserError

reproduce = load_script("scripts/reproduce.py")
BLACK, BLUE, RED = "#000000", "#0072B2", "#D55E00"  # of adamw, precond_func_sam, sam


def fill(tmp_path, specs, loss):
  """Finished runs for (spec, overrides), with a made-up loss."""
  for spec, overrides in specs:
    method = spec.split("method=")[1].split(",")[0]
    folder = tmp_path / "runs"
    value = loss(method, overrides)
    write_run(folder, method, overrides["seed"], value, keys=overrides, spec=spec)


@pytest.mark.parametrize("method, body, head", [("adamw", 3, 3), ("sam", 6, 6), ("func_sam", 6, 6)])
def test_counted_flops_are_the_formula(method, body, head):
  c = config_lib.load(f"{ROOT}/configs/fixed_length.py:size=23.9M,method={method}")
  m, V = c.model, config_lib.PAPER_VOCABULARY
  token = body * m.N * (24 * m.D**2 + 4 * m.L * m.D) + head * 2 * m.D * V
  assert protocol.step_flops(c, V) == token * c.batch_size * m.L


@pytest.mark.parametrize(
  "scale, name", [(scale, name) for name, e in EXPERIMENTS.items() for scale in e.settings]
)
def test_every_stage_plans_valid_runs(tmp_path, name, scale, monkeypatch):
  monkeypatch.setattr(protocol, "step_flops", lambda c, V: 1 if c.opt.method == "adamw" else 2)
  it = lab(tmp_path, name, scale, dry=True)
  for stage in it.stages:
    planned = it.jobs(stage)
    methods = {p.config.opt.method for p in planned}
    expected = {"baseline": {"adamw"}, "factors": set(protocol.FACTOR_METHODS)}
    assert methods == expected.get(stage, set(it.methods))
    for p in planned:
      assert p.config.seed == p.config.data_seed  # what pairs the methods
  losses = published.TABLES.get(name, {})
  for setting in it.settings:
    if setting.paper:
      assert set(losses.get(setting.paper, it.methods)) <= set(it.methods)


def test_language_and_vision_have_data_of_their_own(tmp_path):
  it = lab(tmp_path, "fig2", source="tokens:wiki", images="images:pets", seeds=2)
  found = [(p.config.model.kind, p.config.data.source, p.config.seed) for p in it.jobs("tau")]
  text, images = ("decoder", "tokens:wiki"), ("vit", "images:pets")
  assert found == [(*kind, seed) for kind in (text, images) for seed in (1, 2)]
  it = lab(tmp_path, "outputs", source="tokens:wiki-{vocab_size}", seeds=1)
  data = [p.config.data for p in it.jobs("tau")]
  assert [d.source for d in data[:4]] == [f"tokens:wiki-{n}" for n in (64, 256, 1024, 4096)]
  assert [(d.source, d.classes) for d in data[4:]] == [("digits", 2), ("digits", 10)]
  with pytest.raises(UsageError, match="outputs is ours: it has no scale paper"):
    lab(tmp_path, "outputs", "paper")


def test_runs_of_another_vocabulary_are_another_setting(tmp_path):
  it = lab(tmp_path, "outputs", seeds=1)
  for spec, overrides in it.stage("tau"):
    write_run(it.folder, "adamw", 1, keys=overrides, spec=spec)
  assert [len(it.matching(setting)) for setting in it.settings] == [1] * 6


# Table of the paper: how many sizes or activations, and its methods without adamw.
TABLES = {"table1": (1, 5), "table2": (4, 3), "table3": (4, 3), "table4": (1, 3)}
TABLES |= {"table5": (2, 2), "table6": (1, 3)}


@pytest.mark.parametrize("name", TABLES)
def test_runs_of_each_table_at_the_papers_scale(name, tmp_path):
  settings, methods = TABLES[name]
  it = lab(tmp_path, name, "paper", dry=True, seeds=2)
  tuning, seeds = it.jobs("rho"), it.jobs("seeds")
  assert len(tuning) == settings * (1 + 4 * methods)  # four values of rho
  assert len(seeds) == settings * (1 + methods) * 2
  for job in tuning + seeds:
    assert f"--config.wandb.tags={name}" in job.command
    (seed,) = (word.split("=")[1] for word in job.command if word.startswith("--config.seed="))
    assert f"--config.data_seed={seed}" in job.command


def test_stages_build_on_each_other(tmp_path):
  it = lab(tmp_path)
  with pytest.raises(UserError, match="run the stage 'baseline' first"):
    it.stage("rho")
  fill(tmp_path, it.stage("baseline"), loss)
  it.forget()
  rho = it.stage("rho")
  assert all(o[key] == best for _, o in rho for key, best in BEST.items())
  assert len(rho) == 1 + 5 * len(it.rms)
  with pytest.raises(UserError, match="run the stage 'rho' first"):
    it.stage("seeds")
  fill(tmp_path, rho[1:], loss)
  it.forget()
  seeds = it.stage("seeds")
  assert {o["opt.rho"] for _, o in seeds if "opt.rho" in o} == {BEST_RHO}
  assert sorted(o["seed"] for _, o in seeds) == sorted([1, 2, 3] * 6)


def test_a_size_whose_methods_differ_in_the_schedule_of_rho_is_compared(tmp_path):
  it = lab(tmp_path, "table2", "paper", methods=("adamw", "sam", "precond_func_sam"))
  large = next(s for s in it.settings if s.label == "1208M")
  for method in it.methods:
    write_run(tmp_path / "runs", method, spec=it.spec(large, method))
  report = it.report(large)
  assert len(report.groups) == 3
  assert report.group("sam").best.settings["opt.rho_schedule"] == "warmup"


def test_half_as_many_steps_cost_the_same(tmp_path):
  it = lab(tmp_path, dry=True, methods=("adamw", "sam", "momentum_func_sam"))
  lengths = it.equal_compute(it.settings[0])
  steps = it.config(it.settings[0], "adamw").opt.num_train_steps
  for method, half in (("adamw", 4), ("sam", 1)):
    n = half * steps // 2
    length = it.length(it.settings[0], lengths[method])
    assert length == {"opt.num_train_steps": n, "opt.warmup_steps": n // 10}
  assert steps // 2 < lengths["momentum_func_sam"] < steps


def test_report_of_made_up_runs(tmp_path, capsys):
  it = lab(tmp_path, methods=("adamw", "sam", "precond_func_sam"))
  with pytest.raises(UserError, match=r"has no finished runs .* --stage=baseline"):
    findings.write_report(it, ["reproduce.py"])
  fill(tmp_path, it.stage("baseline"), loss)
  it.forget()
  fill(tmp_path, it.stage("rho")[1:], loss)
  it.forget()
  fill(tmp_path, [s for s in it.stage("seeds") if s[1]["seed"] > 1], loss)
  fill(tmp_path, it.stage("compute"), loss)
  fill(tmp_path, [s for s in it.stage("factors") if s[1].get("model.tied") is False], loss)
  it.forget()
  findings.write_report(it, ["reproduce.py"])
  results = json.loads((tmp_path / "table1" / "results.json").read_text())
  groups = {g["label"]: g for g in results["settings"]["width 32"]["groups"]}
  assert groups.keys() == set(it.methods)
  # -0.01 * len / 10 + 0.0003 * mean seed
  assert groups["precond_func_sam"]["difference"] == pytest.approx(-0.016 + 0.0006)
  assert groups["sam"]["pairs"] == 3 and "both" in groups["sam"]["intervals"]
  assert set(results["more"]["width 32"]) == {
    "at AdamW's compute",
    "against AdamW with twice the steps",
    "factor untied",
  }
  text = (tmp_path / "table1" / "table.md").read_text()
  assert "| 3.86 | -0.04 |" in text and "<summary>factor untied</summary>" in text
  check_differences(read_figure(tmp_path / "table1" / "differences"), groups)
  for name in ("fig1", "fig3"):
    findings.write_report(lab(tmp_path, name), ["reproduce.py"])
  check_curves(read_figure(tmp_path / "fig1" / "curves"))
  check_rho(read_figure(tmp_path / "fig3" / "rho"), lab(tmp_path, "fig3"))


def check_differences(drawn, groups):
  """A mean in its interval for each method, to scale, and the line that is AdamW."""
  assert "eval loss minus adamw (nats), 95% interval (left is better); x: the paper" in drawn.words
  (zero,) = drawn.of(BLACK)
  found = {}
  for method, colour in (("precond_func_sam", BLUE), ("sam", RED)):
    assert method in drawn.words
    interval, mean = drawn.of(colour)
    assert interval.x[0] < mean.x[0] < interval.x[1]
    found[method] = (mean.x[0] - zero.x[0]) / groups[method]["difference"]
  assert found["sam"] > 0 and found["precond_func_sam"] == pytest.approx(found["sam"])


def check_curves(drawn):
  """Losses that fall, AdamW's above SAM's, and beside them SAM's distance below zero."""
  assert {"adamw", "sam", "steps", "eval loss (nats)", "eval loss minus adamw (nats)"} <= {
    *drawn.words
  }
  (adamw, zero), (sam, gap) = drawn.of(BLACK), drawn.of(RED)
  assert adamw.y[1] < adamw.y[0] and all(sam.y < adamw.y) and all(gap.y < zero.y)


def check_rho(drawn, it):
  """Each method's loss at every rho, lowest at its best, where both are below AdamW's."""
  assert {"precond_func_sam", "sam", "adamw", f"{BEST_RHO:g}"} <= {*drawn.words}
  (adamw,) = drawn.of(BLACK)
  for colour in (BLUE, RED):
    (line,) = drawn.of(colour)
    assert len(line.y) == len(it.rms) and line.y.argmin() == 1 and line.y[1] < adamw.y[0]


def test_dry_run_costs(capsys, tmp_path):
  words = f"table1 --scale=paper --out={tmp_path} --dry_run --device=v5e --utilization=0.5"
  reproduce.main(["reproduce.py", *words.split(), "--methods=sam", "--stage=rho"])
  lines = capsys.readouterr().out.splitlines()
  sam = next(line.split() for line in lines if "sam-" in line)
  tokens, cost, hours = map(float, sam[1:4])
  assert tokens == pytest.approx(10_000 * 256 * 512, rel=1e-2)
  assert hours == pytest.approx(cost / (0.5 * 197e12) / 3600, rel=1e-2)
  assert "5 different runs" in lines[-4]
  with pytest.raises(UsageError, match="has the stages rho, seeds"):
    reproduce.main(
      ["reproduce.py", "table2", "--scale=paper", f"--out={tmp_path}", "--stage=factors"]
    )
  words = ["reproduce.py", "table4", "--scale=mini", f"--out={tmp_path}"]
  reproduce.main([*words, "--dry_run", "--stage=sharpness"])
  assert "--stage=sharpness trains nothing" in capsys.readouterr().out
  with pytest.raises(UsageError, match="--set=width: write NAME=VALUE"):
    reproduce.main([*words, "--dry_run", "--set=width"])
