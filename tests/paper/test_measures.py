"""Tables 4 and 6, Figures 2 and 5, from made-up runs and measurements."""

import json

import numpy as np
import pytest
from helpers.drawn import read_figure
from helpers.lab import lab, loss
from helpers.made_up_runs import write_run

from nanosam import config as config_lib
from nanosam.paper import findings, measures, protocol
from nanosam.system.errors import UserError


def filled(tmp_path, name, **settings):
  """An experiment whose runs are all finished."""
  it = lab(tmp_path, name, methods=("adamw", "precond_func_sam"), **settings)
  made = set()
  for stage in it.stages:
    for planned in it.jobs(stage):
      if planned.id not in made:
        made.add(planned.id)
        method, o = planned.config.opt.method, planned.overrides
        value = loss(method, o)
        write_run(it.folder, method, o["seed"], value, keys=o, spec=planned.spec)
    it.forget()
  return it


def finals(it):
  groups = it.report(it.settings[0]).groups
  return {g.label: list(g.best.runs.values()) for g in groups}


def test_sharpness_of_the_best_runs_beside_the_papers(tmp_path):
  it = filled(tmp_path, "table4")
  chosen = finals(it)
  assert {m: len(members) for m, members in chosen.items()} == {"adamw": 3, "precond_func_sam": 3}
  for method, members in chosen.items():
    for seed, run in enumerate(members):
      value = (8.0 if method == "adamw" else 4.0) + seed
      found = {key: {"value": value} for key in measures.COLUMNS}
      (run.path / "sharpness.json").write_text(json.dumps({"step": run.steps, **found}))
  stale = chosen["adamw"][0].path / "sharpness.json"
  stale.write_text(stale.read_text().replace('"step": ', '"step": 1'))  # of another checkpoint
  findings.write_report(it, ["reproduce.py"])
  text = (tmp_path / "table4" / "table.md").read_text()
  assert "| adamw | 2 | 9.5 (10.61) |" in text and "| precond_func_sam | 3 | 5 (6.2) |" in text
  results = json.loads((tmp_path / "table4" / "results.json").read_text())
  found = results["measured"][it.settings[0].label]["sharpness"]
  assert [m["lambda_max"]["value"] for m in found["precond_func_sam"]] == [4.0, 5.0, 6.0]
  assert results["paper_sharpness"]["23.9M"]["sam"]["trace_H"] == 3324.58


@pytest.mark.full
def test_what_is_measured_already_is_not_measured_again(tmp_path):
  """And the first failure ends it: these made-up runs have no checkpoints."""
  it = filled(tmp_path, "table4")
  done, missing, *_ = (run for members in finals(it).values() for run in members)
  (done.path / "sharpness.json").write_text(json.dumps({"step": done.steps}))
  said = []
  with pytest.raises(UserError, match=f"sharpness of {missing.path} failed"):
    measures.measure(it, "sharpness", said.append)
  assert said == [f"[2/6] sharpness of {missing.path.name}"]


def test_measuring_needs_runs(tmp_path):
  with pytest.raises(UserError, match="no finished runs"):
    measures.measure(lab(tmp_path, "table4"), "sharpness", print)


def test_figures_of_taus_and_of_pruning(tmp_path):
  it = lab(tmp_path, "fig2")
  assert it.folder != lab(tmp_path, "fig1").folder  # the same runs by name, but for the taus
  for spec, overrides in it.stage("tau"):
    steps = config_lib.load(spec).opt.num_train_steps
    assert overrides["diagnostics.every"] == steps // protocol.TAUS
    path = write_run(it.folder, "adamw", 1, keys=overrides, spec=spec)
    with open(path / "metrics.jsonl", "a") as f:
      for step in (0, steps // 2, steps):
        taus = {"logit": 0.9 if step < steps else 0.7, "func": 0.2, "cross": -0.1}
        record = {f"{p}/{k}": v for p in ("tau", "tau_precond") for k, v in taus.items()}
        f.write(json.dumps({"step": step, **record}) + "\n")
  findings.write_report(it, ["reproduce.py"])
  table = (tmp_path / "fig2" / "table.md").read_text()
  assert f"| {it.settings[0].label} | 0.70 (0.70, 0.70, 0.70) | 0.20 (0.20, 0.20, 0.20) |" in table
  for name in ("taus", "taus_precond"):
    drawn = read_figure(tmp_path / "fig2" / name)
    assert {"step", "τlogit", "τfunc", "τcross"} <= {*drawn.words}
    assert {setting.label for setting in it.settings} <= {*drawn.words}
    lines = [line for line in drawn.lines if len(line.y) == 3]
    assert len(lines) == 3 * len(it.settings)
    logit, func, cross = (line.y[0] for line in lines[:3])
    assert (logit - cross) / (func - cross) == pytest.approx((0.9 + 0.1) / (0.2 + 0.1))

  it = filled(tmp_path, "fig5")
  for members in finals(it).values():
    for run in members:
      points = [{"sparsity": s, "loss": 3 + s} for s in np.linspace(0, 0.9, 4)]
      found = {"step": run.steps, "method": run.keys["opt.method"], "points": points}
      (run.path / "prune.json").write_text(json.dumps(found))
  findings.write_report(it, ["reproduce.py"])
  drawn = read_figure(tmp_path / "fig5" / "prune")
  assert {"adamw", "precond_func_sam", "weights set to zero (%)"} <= {*drawn.words}
  assert len(drawn.lines) == 2
  assert all(line.follows([p["loss"] for p in points]) for line in drawn.lines)
