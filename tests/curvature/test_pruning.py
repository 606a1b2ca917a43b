"""One-shot magnitude pruning."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.drawn import read_figure

from nanosam import prune
from nanosam.curvature import changes, pruning
from nanosam.model import sharding
from nanosam.optim.base import matching
from nanosam.run import restore
from nanosam.study import figures
from nanosam.system import errors


@pytest.fixture
def params():
  key = jax.random.split(jax.random.key(0), 3)
  return {
    "embed": jax.random.normal(key[0], (24, 8)),
    "layer": {"kernel": 0.1 * jax.random.normal(key[1], (8, 16))},
    "norm": {"scale": 1e-3 * jax.random.normal(key[2], (8,))},
  }


def magnitudes(params, *paths):
  picked = {"embed": params["embed"], "kernel": params["layer"]["kernel"]}
  return np.sort(np.abs(np.concatenate([np.ravel(picked[p]) for p in paths])))


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.999])
def test_the_smallest_weights_go_and_the_rest_stays(params, sparsity):
  """As many as asked for, ranked over all matrices together; norms are left alone."""
  chosen = matching(params, "kernel|embed")
  pruned = pruning.prune(params, chosen, sparsity)
  before, after = magnitudes(params, "embed", "kernel"), magnitudes(pruned, "embed", "kernel")
  gone = round(sparsity * len(before))
  np.testing.assert_array_equal(after[:gone], 0)
  np.testing.assert_array_equal(after[gone:], before[gone:])
  assert changes.zeros(pruned, chosen) == gone / len(before)
  np.testing.assert_array_equal(pruned["norm"]["scale"], params["norm"]["scale"])
  kept = np.asarray(pruned["embed"]) != 0
  np.testing.assert_array_equal(pruned["embed"][kept], params["embed"][kept])


def test_only_what_the_regex_names(params):
  pruned = pruning.prune(params, matching(params, "kernel"), 0.5)
  np.testing.assert_array_equal(pruned["embed"], params["embed"])
  assert np.mean(np.asarray(pruned["layer"]["kernel"]) == 0) == 0.5
  everything = pruning.prune(params, matching(params, ".*"), 0.05)
  assert not np.any(everything["norm"]["scale"])  # the smallest of all


def test_equal_weights_go_together():
  params = {"kernel": jnp.array([3.0, -1.0, 1.0, 1.0, 0.0, -2.0])}
  pruned = pruning.prune(params, {"kernel": True}, 0.5)
  np.testing.assert_array_equal(pruned["kernel"], [3, 0, 0, 0, 0, -2])
  assert changes.zeros(pruned, {"kernel": True}) == 4 / 6


def test_a_mesh_prunes_the_same_and_keeps_the_layout(params):
  chosen = matching(params, "kernel|embed")
  split = jax.device_put(params, sharding.state_shardings(params, sharding.make_mesh(1, 8)))
  one, other = (pruning.prune(p, chosen, 0.4) for p in (params, split))
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert other["embed"].sharding == split["embed"].sharding


def test_the_command(commands, whole, tmp_path):
  """With nothing removed the loss is that of the run; with almost everything, that of chance."""
  other = shutil.copytree(whole, tmp_path / "other")
  words = [f"--workdir={whole}", "--sparsity=0,0.5,0.99", f"--out={tmp_path / 'out'}"]
  outcome = commands("prune", *words, "--compare", str(other), devices=2)
  assert outcome.code == 0, outcome.err
  found = json.loads((tmp_path / "out" / pruning.FILE).read_text())
  assert (found["step"], found["method"]) == (16, "adamw")
  with np.load(whole / "eval_sequences.npz") as saved:
    loss = saved["nll"].sum() / saved["weight"].sum()
  losses = [p["loss"] for p in found["points"]]
  assert losses[0] == pytest.approx(loss, rel=1e-5)
  assert losses[0] < losses[1] < losses[2] + 0.1
  assert losses[2] == pytest.approx(np.log(512), rel=0.05)
  assert [p["zero"] for p in found["points"]] == pytest.approx([0, 0.5, 0.99], abs=1e-3)
  assert found["compared"][0]["points"] == found["points"]
  assert "0.99" in outcome.out
  drawn = read_figure(tmp_path / "out" / "prune")
  (line,) = drawn.lines  # the mean of both
  assert line.follows(losses) and {"adamw", "weights set to zero (%)"} <= {*drawn.words}
  assert not (whole / pruning.FILE).exists()


def error(*words):
  with pytest.raises(errors.UserError) as caught:
    prune.main(["prune", *words])
  return str(caught.value)


def test_errors(whole, tmp_path):
  there = f"--workdir={whole}"
  assert "[0, 1)" in error(there, "--sparsity=0.5,1")
  assert "[0, 1)" in error(there, "--sparsity=-0.1")
  assert "invalid numbers" in error(there, "--sparsity=half")
  assert "not a regex" in error(there, "--params=*")
  assert "matches no parameter" in error(there, "--params=weight")
  assert "holds no run" in error(f"--workdir={tmp_path}")
  (tmp_path / "file").write_text("")
  assert "cannot write" in error(there, f"--out={tmp_path}/file")
  assert "holds no run" in error(f"--workdir={tmp_path}/nowhere")
  assert not (tmp_path / "nowhere").exists()


def test_a_workdir_of_another_version_is_refused(whole, tmp_path):
  other = shutil.copytree(whole, tmp_path / "other")
  config = json.loads((other / "config.json").read_text())
  config["opt"]["twist"] = 3
  (other / "config.json").write_text(json.dumps(config))
  message = error(f"--workdir={other}")
  assert "another version" in message and "opt.twist" in message and "\n" not in message
  del config["opt"]["twist"]
  config["batch_size"] = "many"
  (other / "config.json").write_text(json.dumps(config))
  assert "another version" in error(f"--workdir={other}")
  del config["batch_size"]  # a key younger than the run has its default
  (other / "config.json").write_text(json.dumps(config))
  assert restore.load_run(other).config.batch_size == 256


def test_the_table_and_the_legend_use_the_same_names():
  points = [{"sparsity": 0.0, "loss": 1.0}]
  runs = [{"workdir": f"runs/{i}", "method": m, "points": points} for i, m in enumerate("ABA")]
  heading = pruning.table(runs).splitlines()[0]
  assert heading.split()[1:] == ["A", "(0)", "B", "A", "(2)"]
  assert {*figures.pruning_curves(runs)} == {"A", "B"}
