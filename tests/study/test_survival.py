"""What survives a change of the weights: one model, and models compared."""

import json
import shutil
import time

import numpy as np
import pytest
from helpers.corpus import write_store
from helpers.drawn import read_figure
from helpers.made_up_runs import write_run

from nanosam import survive
from nanosam.curvature import survival as one_model
from nanosam.curvature.changes import Point
from nanosam.curvature.survival import Part, Survival
from nanosam.data.tokenizer import train_tokenizer
from nanosam.model import sharding
from nanosam.run import restore
from nanosam.run.evaluation import Evaluation, Evaluator
from nanosam.run.metrics_file import read_metrics
from nanosam.study import paired, survival
from nanosam.system import errors


def arguments(*words):
  args = survive.parser().parse_args(["--workdir=unused", *words])
  survival.check(args)
  return args


def recorded(workdir):
  with np.load(workdir / "eval_sequences.npz") as saved:
    return saved["nll"], saved["weight"]


def test_changes_of_nothing_cost_nothing(whole, monkeypatch):
  """And the eval set goes to the devices once, whatever the number of settings."""
  sent = []
  send = sharding.to_devices
  monkeypatch.setattr(sharding, "to_devices", lambda *a: sent.append(a) or send(*a))
  run = restore.load_run(whole)
  args = arguments("--noise=0,0.5", "--draws=3", "--sparsity=0,0.5", "--bits=16,3")
  found = one_model.measure(run, whole, args, None)
  nll_R, weight_R = recorded(whole)
  rows, batch_size = len(nll_R), run.config.eval_batch_size
  assert len(sent) == -(-rows // batch_size)
  parts = found.to_json()["parts"]
  loss = Evaluator(run.model, one_model.eval_set(run.source, run.config), 16, run.mesh)(
    run.params
  ).loss
  assert loss == pytest.approx(nll_R.sum() / weight_R.sum(), rel=1e-5)
  for name in ("noise", "prune"):
    unchanged, changed = parts[name]["points"]
    assert parts[name]["loss"] == unchanged["loss"] == pytest.approx(loss, rel=1e-6)
    assert unchanged["rise"] == 0 != changed["rise"]
  assert parts["noise"]["points"][0]["draws"] == [parts["noise"]["loss"]] * 3
  assert len(set(parts["noise"]["points"][1]["draws"])) == 3
  fine, coarse = parts["bits"]["points"]
  assert abs(fine["rise"]) < 1e-4 < abs(coarse["rise"])
  assert coarse["zero"] > fine["zero"]
  assert parts["prune"]["points"][1]["zero"] == pytest.approx(0.5, abs=1e-3)


def made_up(rng, loss, rises, documents=40, rows=60):
  """A model whose noise of size i raises its loss by rises[i]."""
  base_R = 32 * (loss + 0.3 * rng.normal(size=rows))
  base = Evaluation(base_R, np.full(rows, 32.0), 9, documents=documents)
  points = [
    Point(x, base._replace(nll_R=base_R + 32 * (rise + 0.02 * rng.normal(size=rows))), {})
    for x, rise in rises.items()
  ]
  facts = {"workdir": "w", "step": 1200, "weights": "raw", "method": "any", "settings": {}}
  return Survival(facts, {"noise": Part(base, points)})


@pytest.fixture
def study(tmp_path):
  """Two methods on three seeds; sam starts higher and rises less."""
  rng, workdirs, found = np.random.default_rng(0), [], []
  for method, loss, slope in (("adamw", 3.5, 1.0), ("sam", 3.6, 0.5)):
    for seed in (1, 2, 3):
      workdirs.append(write_run(tmp_path, method, seed))
      rises = {x: slope * x + 0.01 * rng.normal() for x in (0.1, 0.4)}
      found.append(made_up(rng, loss, rises))
  return [survival.describe(str(w)) for w in workdirs], found


def test_pairs_and_intervals_as_in_compare(study):
  runs, found = study
  compared, notes = survival.compare(runs, found, arguments("--tune=opt.rho"))
  assert not notes
  (small, large) = compared["noise"]
  assert (small["noise"], large["noise"]) == (0.1, 0.4)
  rise_SxR = {
    method: np.stack(
      [s.parts["noise"].points[1].evaluation.nll_R - s.parts["noise"].base.nll_R for s in members]
    )
    for method, members in (("adamw", found[:3]), ("sam", found[3:]))
  }
  x_SxU = paired.units(rise_SxR["sam"] - rise_SxR["adamw"], np.full(60, 32.0), 40)
  by_hand = paired.over_both(x_SxU, 0.95)
  group = next(g for g in large["rise"]["groups"] if g["label"] == "sam")
  assert group["pairs"] == 3
  assert group["difference"] == pytest.approx(x_SxU.mean())
  assert group["intervals"]["both"] == by_hand._asdict()
  assert by_hand.high < -0.1  # it rises less
  after = next(g for g in large["loss"]["groups"] if g["label"] == "sam")
  mean = np.mean([s.parts["noise"].points[1].evaluation.loss for s in found[3:]])
  assert after["loss"] == pytest.approx(mean)
  table = survival.table("noise", compared["noise"])
  assert [row[:3] for row in table.rows[-2:]] == [["0.4", "adamw", "3"], ["0.4", "sam", "3"]]
  assert table.rows[-1][-2] == f"{group['difference']:+.4f}"


def test_the_figure(study, tmp_path):
  runs, found = study
  compared, _ = survival.compare(runs, found, arguments("--tune=opt.rho"))
  assert survival.draw(compared, tmp_path, "adamw") == ["survive-noise.png"]
  drawn = read_figure(tmp_path / "survive-noise")
  assert {"adamw", "sam", "rise minus adamw's"} <= {*drawn.words}
  curves = survival.rises_by_seed("noise", compared["noise"])
  assert [len(members) for members in curves.values()] == [3, 3]


def test_a_loss_that_is_not_finite_is_said(study):
  runs, found = study
  part = found[5].parts["noise"]
  bad = part.points[1].evaluation._replace(nll_R=np.full(60, np.nan))
  found[5] = found[5]._replace(
    parts={"noise": part._replace(points=[part.points[0], part.points[1]._replace(evaluation=bad)])}
  )
  compared, notes = survival.compare(runs, found, arguments("--tune=opt.rho"))
  assert survival.table("noise", compared["noise"]).rows[-1][3] == "not finite"
  assert any("diverged" in note for note in notes)


def test_a_measurement_is_stored_whole(study, tmp_path):
  _, (one, *_) = study
  one_model.save(one, tmp_path / "one.npz")
  again = one_model.load(tmp_path / "one.npz")
  assert again.to_json() == one.to_json()
  np.testing.assert_array_equal(again.parts["noise"].base.nll_R, one.parts["noise"].base.nll_R)
  assert one_model.load(tmp_path / "none.npz") is None
  (tmp_path / "one.npz").write_bytes((tmp_path / "one.npz").read_bytes()[:99])
  with pytest.raises(errors.UserError, match=r"one.npz is damaged .*: delete it"):
    one_model.load(tmp_path / "one.npz")


def error(*words):
  with pytest.raises(errors.UserError) as caught:
    survive.main(["survive", *map(str, words)])
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_errors(whole, tmp_path):
  there = f"--workdir={whole}"
  assert "did you mean noise" in error(there, "--parts=nois")
  for bits in ("1", "17", "3.5", "-4"):
    assert "whole number from 2 to 16" in error(there, f"--bits={bits}")
  assert "[0, 1)" in error(there, "--sparsity=1")
  assert "must not be negative" in error(there, "--noise=-0.1")
  assert "--draws=0" in error(there, "--draws=0")
  assert "not a regex" in error(there, "--params=*")
  assert "matches no parameter" in error(there, "--params=weight")
  assert "--source" in error(there, "--parts=forgetting")
  assert "add it to --parts" in error(there, "--parts=bits", "--source=embedded")
  assert "raw weights" in error(there, "--source=embedded", "--weights=average")
  assert "no averaged weights" in error(there, "--weights=average")
  assert "no checkpoint 13" in error(there, "--step=13")
  assert "holds no run" in error(f"--workdir={tmp_path}")
  without = shutil.copytree(whole, tmp_path / "without")
  shutil.rmtree(without / "checkpoints")
  assert "has no checkpoints" in error(f"--workdir={without}")
  assert "same settings, seed and data_seed" in error(there, "--compare", whole)
  other = shutil.copytree(whole, tmp_path / "other")
  config = json.loads((other / "config.json").read_text())
  config["opt"]["method"], config["environment"]["eval_set"]["bytes"] = "sam", 1
  (other / "config.json").write_text(json.dumps(config))
  message = error(there, "--compare", other)
  assert "different eval set" in message and str(other) in message
  assert not (whole / "survive.json").exists()


def test_the_command(commands, whole, tmp_path):
  out = tmp_path / "out"
  words = ["--noise=0.5", "--bits=4", "--sparsity=0.5", f"--out={out}"]
  outcome = commands("survive", f"--workdir={whole}", *words, devices=2)
  assert outcome.code == 0, outcome.err
  found = json.loads((out / one_model.FILE).read_text())
  assert (found["step"], found["method"]) == (16, "adamw") and [*found["parts"]] == [
    "noise",
    "bits",
    "prune",
  ]
  here = one_model.measure(restore.load_run(whole), whole, arguments(*words), None).to_json()
  for name, part in here["parts"].items():  # on eight devices
    (point,), (other,) = part["points"], found["parts"][name]["points"]
    assert point["loss"] == pytest.approx(other["loss"], rel=1e-5)
    read_figure(out / f"survive-{name}")
  assert "sparsity  group" in outcome.out and "written: " in outcome.out


@pytest.fixture
def source(whole, tmp_path):
  """Other text, in the vocabulary of the run."""
  text = "The quick brown fox jumps over the lazy dog. " * 40
  return write_store(tmp_path / "fox", restore.load_run(whole).source.tokenizer, [text] * 8)


@pytest.mark.full
def test_forgetting(commands, whole, tmp_path, source):
  """A real run that starts from the model: at step 0 its losses; then it learns, and forgets."""
  out = tmp_path / "out"
  words = [f"--workdir={whole}", f"--out={out}", "--parts=forgetting", f"--source={source}"]
  words += ["--finetune_steps=20", "--finetune_learning_rate=0.01"]
  outcome = commands("survive", *words)
  assert outcome.code == 0, outcome.err
  found = json.loads((out / one_model.FILE).read_text())["parts"]
  old, new = found["forgetting"]["points"], found["learning"]["points"]
  assert [p["steps"] for p in old] == [p["steps"] for p in new] == [0, 4, 8, 12, 16, 20]
  nll_R, weight_R = recorded(whole)
  assert old[0]["loss"] == nll_R.sum() / weight_R.sum() and old[0]["rise"] == 0
  there = commands("evaluate", f"--workdir={whole}", f"--source={source}", "--json")
  assert new[0]["loss"] == json.loads(there.out)["eval/loss"]
  assert new[-1]["loss"] < new[0]["loss"] - 0.5 and old[-1]["rise"] > 0.1
  (tuned,) = (out / "finetuned").iterdir()
  config = json.loads((tuned / "config.json").read_text())
  assert config["environment"]["init_from"].items() >= {"workdir": str(whole), "step": 16}.items()
  assert config["environment"]["command"][:3] == ["python", "-m", "nanosam.survive"]
  last = read_metrics(tuned / "metrics.jsonl")[-1]
  assert new[-1]["loss"] == last["eval/loss"]  # its own evaluation
  before = (tuned / "metrics.jsonl").stat().st_mtime_ns
  assert commands("survive", *words).code == 0  # trains nothing again
  assert (tuned / "metrics.jsonl").stat().st_mtime_ns == before
  assert json.loads((out / one_model.FILE).read_text())["parts"] == found


@pytest.mark.full
def test_fine_tuning_resumes(commands, whole, tmp_path, source):
  words = [f"--workdir={whole}", "--parts=forgetting", f"--source={source}", "--finetune_steps=5"]
  straight, killed = tmp_path / "straight", tmp_path / "killed"
  assert commands("survive", *words, f"--out={straight}").code == 0
  process = commands.start("survive", *words, f"--out={killed}")
  deadline = time.monotonic() + 60
  while not list(killed.glob("finetuned/*/checkpoints/2")) and time.monotonic() < deadline:
    time.sleep(0.001)
  process.kill()
  process.communicate()
  assert commands("survive", *words, f"--out={killed}").code == 0
  one, other = (json.loads((f / one_model.FILE).read_text())["parts"] for f in (straight, killed))
  assert one == other


def test_fine_tuning_in_another_vocabulary_is_refused(commands, whole, tmp_path):
  text = "\n".join(f"the quick brown fox {n} jumps over the lazy dog" for n in range(300))
  source = write_store(tmp_path / "other", train_tokenizer([text], 300), [text])
  words = [f"--workdir={whole}", f"--out={tmp_path / 'out'}", f"--source={source}"]
  outcome = commands("survive", *words)
  assert outcome.code == 2
  outcome.says_in_one_line("another vocabulary", source)
  assert not (tmp_path / "out" / one_model.FILE).exists()


def test_a_study_of_folders_resumes(whole, tmp_path, monkeypatch):
  """The same model under two names: nothing differs. What was measured is not measured again."""
  folder, out = tmp_path / "runs", tmp_path / "out"
  for method in ("adamw", "sam"):
    workdir = shutil.copytree(whole, folder / method)
    config = json.loads((workdir / "config.json").read_text())
    config["opt"]["method"] = method
    (workdir / "config.json").write_text(json.dumps(config))
  args = arguments("--parts=bits,prune", "--bits=3", "--sparsity=0.5")
  survival.study([folder], args, out, ["reproduce.py", "survive"])
  first = (out / "results.json").read_text()
  results = json.loads(first)
  (entry,) = results["comparison"]["bits"]
  sam = next(g for g in entry["rise"]["groups"] if g["label"] == "sam")
  assert (sam["difference"], sam["pairs"]) == (0, 1)
  table = (out / "table.md").read_text()
  assert "| 3 | sam | 1 |" in table and "![prune](survive-prune.svg)" in table
  read_figure(out / "survive-prune")

  def again(*_):
    raise AssertionError("measured again")

  monkeypatch.setattr(one_model, "measure", again)
  survival.study([folder], args, out, ["reproduce.py", "survive"])
  assert (out / "results.json").read_text() == first
  with pytest.raises(AssertionError, match="measured again"):
    survival.study([folder], arguments("--parts=bits,prune", "--bits=4"), out, [])
