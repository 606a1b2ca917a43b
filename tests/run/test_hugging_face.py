"""A run as GPT-2's files: the weights, the folder that is whole or not there, what is refused."""

import itertools
import json
import shutil
import weakref

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.training import state
from safetensors.numpy import load_file

from nanosam import config as config_lib
from nanosam import export
from nanosam.model import sharding
from nanosam.run import hugging_face, restore
from nanosam.run.checkpoint import checksums
from nanosam.run.safetensors_file import write_safetensors
from nanosam.run.step import TrainStep
from nanosam.system.errors import UserError
from nanosam.system.files import lock_file


@pytest.fixture(scope="module")
def run(whole):
  return restore.open_run(whole)


def test_weights(run, whole, tmp_path):
  hugging_face.write_weights(run, tmp_path / "w.safetensors")
  found = load_file(tmp_path / "w.safetensors")
  params = {path[1:]: x for path, x in state(whole, 16).items() if path[0] == "params"}

  def ours(name):
    return params["layer_0", *name.split("/")]

  qkv = [ours(f"attention/{name}/kernel") for name in ("query", "key", "value")]
  layer = {
    "attn.c_attn.weight": np.concatenate(qkv, axis=1),
    "attn.c_proj.weight": ours("attention/out/kernel"),
    "ln_1.weight": ours("norm1/scale"),
    "ln_2.weight": ours("norm2/scale"),
    "mlp.c_fc.weight": ours("mlp/up/kernel"),
    "mlp.c_proj.weight": ours("mlp/down/kernel"),
  }
  expected = {
    **{f"transformer.h.0.{name}": value for name, value in layer.items()},
    "transformer.wte.weight": params["embed",],
    "transformer.wpe.weight": params["pos_embed",],
    "transformer.ln_f.weight": params["out_norm", "scale"],
  }
  biases = {name for name in found if name.endswith(".bias")}
  assert found.keys() == expected.keys() | {n.replace(".weight", ".bias") for n in expected} - {
    "transformer.wte.bias",
    "transformer.wpe.bias",
  }
  for name in biases:
    assert not found[name].any() and found[name].shape == found[name[:-4] + "weight"].shape[-1:]
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.full
def test_averaged_weights(commands, tmp_path):
  """Wherever they are in the optimizer's state; nothing else of it is read."""
  more = {"opt__average": "ema", "opt__average_decay": 0.5, "opt__clip_by_global_norm": 1.0}
  assert commands.train(tmp_path / "run", **more).code == 0
  run = restore.open_run(tmp_path / "run", weights="average")
  hugging_face.write_weights(run, tmp_path / "w.safetensors")
  found = load_file(tmp_path / "w.safetensors")
  saved = state(tmp_path / "run", 16)
  average = {p[3:]: x for p, x in saved.items() if p[0] == "opt_state" and p[2] == "average"}
  loaded = restore.load_run(tmp_path / "run", weights="average").params
  np.testing.assert_array_equal(found["transformer.wte.weight"], average["embed",])
  np.testing.assert_array_equal(loaded["embed"], average["embed",])
  down = ("layer_0", "mlp", "down", "kernel")
  np.testing.assert_array_equal(found["transformer.h.0.mlp.c_proj.weight"], average[down])
  assert np.any(average["embed",] != saved["params", "embed"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_shapes_and_order(tied, stacked):
  """Every parameter has its place, and those of one read stand together."""
  c = config_lib.default(size="mini")
  c.model.update(tied=tied, scan_layers=stacked, F=96)
  params = TrainStep(c, 40, sharding.make_mesh(1, -1)).abstract_params
  tensors = hugging_face.gpt2_tensors(params, c.model.N)
  weights = [t for t in tensors if t.leaves]
  sizes = sum(int(np.prod(t.shape)) for t in weights)
  assert sizes == config_lib.parameter_counts(c, 40)["total"]
  assert ("lm_head.weight" in {t.name for t in tensors}) == (not tied)
  reads = [leaves for leaves, _ in itertools.groupby(t.leaves for t in weights)]
  assert len(reads) == len(set(reads))
  used = [name for leaves in reads for name in leaves]
  assert sorted(used) == sorted(flatten_dict(params, sep="/"))
  by_name = {t.name: t.shape for t in tensors}
  assert by_name["transformer.h.2.attn.c_attn.weight"] == (64, 192)
  assert by_name["transformer.h.2.attn.c_attn.bias"] == (192,)
  assert by_name["transformer.h.0.mlp.c_fc.weight"] == (64, 96)


def test_parameters_are_released_before_the_next_are_read(run, tmp_path, monkeypatch):
  alive: list[weakref.ref] = []
  restore_parts = type(run.checkpoints).restore_parts

  def counted(self, *args, **kwargs):
    assert not [r for r in alive if r() is not None]
    found = restore_parts(self, *args, **kwargs)
    alive.extend(weakref.ref(x) for x in jax.tree.leaves(found))
    return found

  monkeypatch.setattr(type(run.checkpoints), "restore_parts", counted)
  hugging_face.write_weights(run, tmp_path / "w.safetensors")
  assert len(alive) == 3 + 8  # of the model, and of its one layer


def test_checksums_on_the_host_are_those_of_the_devices(monkeypatch):
  monkeypatch.setattr("nanosam.run.checkpoint._BLOCK_BYTES", 100)
  rng = np.random.default_rng(0)
  for shape in ((), (1,), (7,), (11, 13), (3, 5, 7), (0, 2)):
    x = np.asarray(rng.standard_normal(shape), np.float32)
    assert checksums({"x": x}) == checksums({"x": jax.numpy.asarray(x)}), shape


def test_a_wrong_shape_is_not_written(tmp_path):
  with pytest.raises(ValueError, match="a is float32"):
    write_safetensors(tmp_path / "w", {"a": (2,)}, iter([np.zeros(3, np.float32)]))


def error(*words):
  with pytest.raises(UserError) as caught:
    export.main(["export", *words])
  return str(caught.value)


def test_a_target_that_is_there(whole, tmp_path):
  """A half-written export of another program, or anything else, stays as it is."""
  out = tmp_path / "out"
  out.mkdir()
  (out / "config.json").write_text("{}")
  assert "is there already" in error(f"--workdir={whole}", f"--out={out}")
  assert (out / "config.json").read_text() == "{}"
  assert "is there already" in error(f"--workdir={whole}", f"--out={out / 'config.json'}")
  assert "is there already" in error(f"--workdir={whole}", "--out=.")
  assert "remote" in error(f"--workdir={whole}", "--out=gs://bucket/out")
  assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_no_checkpoint(whole, tmp_path):
  out = tmp_path / "out"
  assert "holds no run" in error(f"--workdir={tmp_path}", f"--out={out}")
  bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
  assert "no checkpoints" in error(f"--workdir={bare}", f"--out={out}")
  assert "no checkpoint 13" in error(f"--workdir={whole}", f"--out={out}", "--step=13")
  assert "--out" in error(f"--workdir={whole}")
  assert "--format" in error(f"--workdir={whole}", f"--out={out}", "--format=onnx")
  assert not list(tmp_path.glob("out*"))


def test_a_folder_becomes_the_target_only_when_whole(tmp_path):
  target = tmp_path / "deep" / "out"
  with pytest.raises(UserError, match="bad"), hugging_face.whole_folder(target) as folder:
    (folder / hugging_face.CONFIG).write_text("half")
    raise UserError("bad")
  assert not list(target.parent.iterdir())
  folder = target.with_name("out.partial")  # of an export that was killed
  folder.mkdir()
  (folder / hugging_face.WEIGHTS).write_text("half")
  with hugging_face.whole_folder(target) as folder:
    assert not target.exists()
    (folder / hugging_face.WEIGHTS).write_text("all")
  assert (target / hugging_face.WEIGHTS).read_text() == "all"
  other = tmp_path / "other.partial"
  other.mkdir()
  lock_file(other)
  with (
    pytest.raises(UserError, match="another process"),
    hugging_face.whole_folder(tmp_path / "other"),
  ):
    pass


def test_a_damaged_checkpoint(whole, tmp_path):
  other = shutil.copytree(whole, tmp_path / "other")
  for file in other.glob("checkpoints/16/state/**/d/*"):
    file.write_bytes(file.read_bytes()[:-9])
  run = restore.open_run(other)
  with pytest.raises(UserError, match=r"checkpoint 16 .* there are also 12"):
    hugging_face.write_weights(run, tmp_path / "w.safetensors")


def test_missing_packages(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert "pip install -e '.[hf]'" in error("--workdir=x", "--out=y")


def test_config(run):
  c = hugging_face.gpt2_config(run, run.source.tokenizer)
  assert c["nanosam"].items() >= {"method": "adamw", "step": 16, "weights": "raw"}.items()
  assert json.loads(json.dumps(c)) == c
  assert c["layer_norm_epsilon"] == 1e-6 and c["activation_function"] == "gelu_new"
  assert (c["bos_token_id"], c["eos_token_id"], c["pad_token_id"]) == (2, 1, 0)
