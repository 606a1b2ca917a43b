"""The dashboard's specification, as W&B would be sent it, and the upload of offline runs."""

import json
import subprocess

import pytest
from helpers.scripts import load_script
from helpers.training import ROOT

from nanosam.optim.methods import METHODS
from nanosam.run import log, metrics_file
from nanosam.run.wandb_process import X_AXES
from nanosam.study import dashboard
from nanosam.study.runs import AXES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")


@pytest.fixture(scope="module")
def section():
  return dashboard.workspace("someone", "nanosam")._spec["spec"]["section"]


def panels(section):
  return {
    s["name"]: [p["config"] for p in s["panels"]] for s in section["panelBankConfig"]["sections"]
  }


def test_eval_loss_against_every_axis_and_lines_that_are_means_over_seeds(section):
  found = panels(section)["Eval loss by method"]
  axes = [p["xAxis"] for p in found if p["metrics"] == ["eval/loss"]]
  assert axes == list(X_AXES) == [axis.key for axis in AXES.values()]
  assert {p["groupAgg"] for p in found} == {"mean"}
  assert {p["groupArea"] for p in found} == {"minmax"}
  grouping = [g["name"] for g in section["runSets"][0]["grouping"]]
  assert grouping == ["opt.value.method", "opt.value.rho"]
  colours = section["customRunColors"]
  assert len(colours) == len(METHODS) and "#0072B2" in colours.values()


def test_rho_taus_and_guards(section):
  found = panels(section)
  scatter, parallel = found["Loss against rho"]
  assert (scatter["xAxis"], scatter["yAxis"]) == ("config:opt.value.rho", "summary:last_eval_loss")
  assert scatter["xAxisLogScale"]
  assert "config:opt.value.method" in [c["accessor"] for c in parallel["columns"]]
  taus = {m for p in found["Curvature: taus"] for m in p["metrics"]}
  assert taus == {f"{a}/{b}" for a in ("tau", "tau_precond") for b in ("logit", "func", "cross")}
  assert {m for p in found["Guards"] for m in p["metrics"]} == {
    *("guard/nonfinite", "guard/perturbed_nonfinite", "guard/no_perturbation"),
  }


def test_it_draws_what_training_logs(section, whole):
  logged = {k for r in metrics_file.read_metrics(whole / metrics_file.METRICS_FILE) for k in r}
  of_perturbing = {"train/loss_perturbed", "opt/eps_norm"}
  on_known_devices = {"perf/utilization"}
  drawn = {m for ps in panels(section).values() for p in ps for m in p.get("metrics", [])}
  drawn = {m for m in drawn if not m.startswith("tau")}
  assert drawn - of_perturbing - on_known_devices <= logged
  assert set(X_AXES) <= logged


def test_dry_run_prints_json(capsys):
  load_script("scripts/wandb_dashboard.py").main(
    ["wandb_dashboard.py", "--dry_run", "--project=mine"]
  )
  assert json.loads(capsys.readouterr().out)["project"] == "mine"


def sync(*words, cwd):
  command = ["bash", ROOT / "scripts" / "wandb_sync.sh", *words]
  return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_offline_runs_are_found_and_the_rest_is_one_line(tmp_path):
  said = []
  w = log.open_writers(
    *[tmp_path / "runs" / "one"],
    config={},
    run={},
    wandb="offline",
    tensorboard=False,
    resume_step=None,
    close_timeout=60,
    say=said.append,
  )
  w.write(1, {"eval/loss": 3.0})
  w.close()
  done = sync("runs", "--dry-run", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "offline-run-" in done.stdout + done.stderr
  (tmp_path / "empty").mkdir()
  for words, code, line in (
    ([], 2, "usage: wandb_sync.sh DIR"),
    (["none"], 2, "no such folder: none"),
    (["empty"], 1, "no offline recordings"),
  ):
    done = sync(*words, cwd=tmp_path)
    assert done.returncode == code and line in done.stderr and done.stderr.count("\n") == 1
