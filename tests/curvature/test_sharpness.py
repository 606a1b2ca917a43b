"""The sharpness command, and taus during training."""

import json

import numpy as np
import pytest
from helpers.drawn import read_figure
from helpers.training import assert_same_run

from nanosam import sharpness as command
from nanosam.curvature import sharpness
from nanosam.curvature.diagnostics import validation_rows
from nanosam.run import restore
from nanosam.run.metrics_file import read_metrics
from nanosam.system import errors

QUICK = ("--batches=2", "--batch_size=4", "--directions=1", "--rho=0.01,0.1")


def measured(workdir, *words):
  args = command.parser().parse_args([f"--workdir={workdir}", *QUICK, *words])
  command.check(args)
  run = restore.load_run(workdir, with_moments=True)
  return run, sharpness.measure(run, args)


@pytest.fixture(scope="module")
def found(whole):
  return measured(whole)


@pytest.mark.full
def test_every_number_has_its_error(found):
  _, found = found
  assert json.loads(json.dumps(found)) == found
  assert (found["step"], found["method"], found["sequences"], found["batches"]) == (
    *(16, "adamw"),
    *(8, 2),
  )
  largest, smallest = found["lambda_max"], found["lambda_min"]
  assert 0 < largest["residual"] <= 0.01 * largest["value"]
  assert smallest["value"] < 0 < found["lambda_max_HG"]["value"] < 2 * largest["value"]
  for name in ("trace_H", "trace_HG"):
    assert 0 < found[name]["sem"] <= 0.03 * found[name]["value"]
  total = found["trace_HG"]["value"] + found["trace_HF"]["value"]
  assert total == pytest.approx(found["trace_H"]["value"], rel=1e-6)
  for prefix in ("tau", "tau_precond"):
    shares = [found[f"{prefix}_{path}"]["value"] for path in ("logit", "func", "cross")]
    assert sum(shares) == pytest.approx(1, abs=1e-5) and min(shares[:2]) > 0


@pytest.mark.full
def test_small_steps_rise_by_slope_and_curvature(found):
  """L(theta + rho g/|g|) - L(theta) = rho |g| + O(rho^2); the loss bends by about lambda_max."""
  _, found = found
  first, second = found["sam_sharpness"]
  assert first["rho"] == 0.01
  assert first["gradient"] == pytest.approx(0.01 * found["gradient_norm"], rel=0.1)
  assert second["gradient"] > first["gradient"] > first["preconditioned"] > 0
  lines = found["landscape"]
  x, top = np.asarray(lines["distance"]), np.asarray(lines["top"])
  middle = len(x) // 2
  assert x[middle] == 0 and top[middle] == pytest.approx(found["loss"], rel=1e-5)
  bend = (top[middle + 1] - 2 * top[middle] + top[middle - 1]) / (x[1] - x[0]) ** 2
  assert bend == pytest.approx(found["lambda_max"]["value"], rel=0.5)
  slope = (top[middle + 1] - top[middle - 1]) / (2 * (x[1] - x[0]))
  assert slope == pytest.approx(lines["top_slope"], rel=0.2, abs=0.02)
  random = np.asarray(lines["random"])
  assert np.ptp(random) < 0.5 * np.ptp(top)  # of many directions hardly any is sharp


@pytest.mark.full
def test_the_ball_and_the_critical_step(found):
  _, found = found
  for row in found["sam_sharpness"]:
    assert row["gradient"] <= row["ball"] <= 3 * row["gradient"]
  assert found["sam_sharpness"][1]["ball"] > found["sam_sharpness"][1]["gradient"]
  assert 0 < found["critical_sharpness"] < 2 * found["lambda_max"]["value"]
  assert found["critical_sharpness_update"] > 0


@pytest.mark.full
def test_the_density_and_the_bound(commands, whole, found, tmp_path):
  """Chosen by --measures; they are added to what was measured before."""
  earlier = tmp_path / sharpness.FILE
  earlier.write_text(json.dumps({**found[1], "seconds": 0}))
  words = ["--density_probes=3", "--density_steps=16", "--draws=4", "--sigma=0.001,0.1"]
  words += [f"--workdir={whole}", *QUICK, f"--out={tmp_path}"]
  outcome = commands("sharpness", *words, "--measures=density,pac_bayes", devices=8)
  assert outcome.code == 0, outcome.err
  assert "vacuous" in outcome.out and "assumes: training documents" in outcome.out
  assert "lambda_max" not in outcome.out and not (tmp_path / "sharpness.png").exists()
  written = json.loads(earlier.read_text())
  assert written["lambda_max"] == found[1]["lambda_max"] and written["seconds"] > 0
  curve, trace = written["density"], written["density"]["trace"]
  assert np.shape(curve["nodes"]) == np.shape(curve["weights"]) == (3, 16)
  assert np.sum(curve["weights"], axis=1) == pytest.approx(np.ones(3))
  spread = 4 * (trace["sem"] + found[1]["trace_H"]["sem"])
  assert abs(trace["value"] - found[1]["trace_H"]["value"]) < spread
  top = found[1]["lambda_max"]["value"]
  assert np.max(curve["nodes"]) == pytest.approx(top, rel=0.05)
  drawn = read_figure(tmp_path / "density")
  assert {"3 probes, 16 steps", "eigenvalue of H"} <= {*drawn.words}
  bound = written["pac_bayes"]
  assert bound["vacuous"] and bound["units"] >= 8 and 0 < bound["train_error"] <= 1
  assert bound["bound"] == min(row["bound"] for row in bound["grid"]) and len(bound["grid"]) == 2
  assert 0 < bound["distance"] < 100


def test_only_the_same_model_on_the_same_rows_keeps_what_was_measured(tmp_path):
  same = dict.fromkeys(("step", "weights", "method", "sequences", "tokens", "batches"), 1)
  found, file = {**same, "loss": 2.0, "density": 3}, tmp_path / sharpness.FILE
  assert sharpness.with_earlier(found, file) == found
  file.write_text("{")
  assert sharpness.with_earlier(found, file) == found
  file.write_text(json.dumps({**same, "loss": 2.0, "trace_H": 4}))
  assert sharpness.with_earlier(found, file) == {**found, "trace_H": 4}
  file.write_text(json.dumps({**same, "loss": 2.5, "trace_H": 4}))
  assert sharpness.with_earlier(found, file) == found


@pytest.mark.full
def test_more_vectors_than_fit_are_not_kept(whole, found, monkeypatch):
  """The replayed recurrence gives the same numbers."""
  monkeypatch.setattr(sharpness, "KEEP_BYTES", 0)
  _, other = measured(whole)
  for name in ("lambda_max", "lambda_max_HG"):
    assert other[name]["value"] == pytest.approx(found[1][name]["value"], rel=1e-3)
  np.testing.assert_allclose(
    *(np.asarray(x["landscape"]["random"]) for x in (other, found[1])), rtol=1e-5
  )


@pytest.mark.full
def test_the_command(commands, whole, found, tmp_path):
  """On two devices what the test's eight find; nothing of the workdir changes."""
  words = [f"--workdir={whole}", *QUICK, f"--out={tmp_path / 'out'}"]
  outcome = commands("sharpness", *words, devices=2)
  assert outcome.code == 0, outcome.err
  assert "lambda_max(H)" in outcome.out and "tau_precond_cross" in outcome.out
  assert "left" in outcome.err
  written = json.loads((tmp_path / "out" / sharpness.FILE).read_text())
  for name in ("lambda_max", "trace_H", "tau_logit", "tau_precond_func"):
    assert written[name]["value"] == pytest.approx(found[1][name]["value"], rel=1e-2)
  drawn = read_figure(tmp_path / "out" / "sharpness")
  assert {"top eigenvector", "random directions"} <= {*drawn.words}
  random, top, parabola = drawn.lines
  assert top.follows(written["landscape"]["top"])
  assert random.follows(written["landscape"]["random"][0])
  assert len(parabola.y) == len(top.y)
  assert not (whole / sharpness.FILE).exists()


def error(*words):
  with pytest.raises(errors.UserError) as caught:
    command.main(["sharpness", *words])
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_errors(whole, tmp_path):
  there = f"--workdir={whole}"
  assert "--probes=0 must be at least 2" in error(there, "--probes=0")
  assert "--batches=0" in error(there, "--batches=0")
  assert "between 0 and 1" in error(there, "--sem=0")
  assert "positive" in error(there, "--rho=0.1,-1")
  assert "scales must be positive" in error(there, "--sigma=0")
  assert "--ascent_steps=0 must be at least 1" in error(there, "--ascent_steps=0")
  message = error(there, "--measures=taus,trace")
  assert "there is no 'trace'; choose of taus, traces" in message
  assert "holds no run" in error(f"--workdir={tmp_path}")
  assert "say where to write the results, --out=DIR" in error("--workdir=gs://bucket/run")
  assert "choose latest, best or one of 12, 16" in error(there, "--step=13")
  message = error(there, "--batch_size=100000")
  assert "400000 sequences of 32 tokens" in message and "lower --batches or" in message


def test_rows_are_full_and_as_many_as_asked_for(whole):
  run = restore.load_run(whole)
  few, more = (validation_rows(run.source, run.config, n, fewer="") for n in (5, 9))
  assert few.inputs.shape == (5, 32) and few.weights_BxL.min() == 1
  np.testing.assert_array_equal(few.inputs, more.inputs[:5])


# During training.


@pytest.mark.full
def test_diagnostics_leave_a_run_as_it_is(commands, whole, tmp_path):
  """Bit by bit, also when it is interrupted; and the cost of training does not count them."""
  workdir, words = tmp_path / "run", {"diagnostics__every": 6, "diagnostics__batch_size": 4}
  outcome = commands.train(workdir, fault="SIGTERM@step:12", **words)
  assert outcome.code == 75, outcome.err
  assert commands.train(workdir, **words).code == 0
  assert_same_run(workdir, whole)
  records = [r for r in read_metrics(workdir / "metrics.jsonl") if "tau/logit" in r]
  assert [r["step"] for r in records] == [0, 6, 12, 16]
  for record in records:
    for prefix in ("tau", "tau_precond"):
      shares = [record[f"{prefix}/{path}"] for path in ("logit", "func", "cross")]
      assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert record["sharpness/critical"] > 0 and record["sharpness/critical_update"] > 0
  compute = {r["step"]: r["compute"] for r in read_metrics(whole / "metrics.jsonl")}
  for record in read_metrics(workdir / "metrics.jsonl"):
    assert record.get("compute", compute.get(record["step"])) == compute.get(record["step"])
  drawn = commands("plots", f"--workdir={workdir}", "--what=tau", f"--out={tmp_path / 'taus'}")
  assert drawn.code == 0, drawn.err
  figure = read_figure(tmp_path / "taus")
  assert {"τlogit", "τfunc", "τcross", "step"} <= {*figure.words}
  *lines, zero = figure.lines
  assert len(zero.y) == 2
  for line, path in zip(lines, ("logit", "func", "cross"), strict=True):
    later = [record[f"tau/{path}"] for record in records[1:]]  # the first may lie outside
    assert line._replace(y=line.y[1:]).follows(later)
