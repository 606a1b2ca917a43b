import json
import re

import jax
import jax.numpy as jnp
import pytest

from nanosam import config as config_lib
from nanosam import train
from nanosam.model.classifier import model_config
from nanosam.model.transformer import Transformer
from nanosam.run.validate import check_devices, validate
from nanosam.study import runs
from nanosam.system.errors import UsageError

QUICKSTART = "configs/quickstart.py"


def parse(*overrides, file=QUICKSTART):
  c = config_lib.from_command_line(["train", f"--config={file}", *overrides])
  validate(c)
  return c


def test_overrides_reach_the_config_with_the_right_types():
  c = parse(
    "--config.opt.peak_learning_rate=3",
    "--config.data.repeat=false",
    *("--config.model.D", "128"),
    "--config.workdir=12",
  )
  assert (c.opt.peak_learning_rate, c.data.repeat, c.model.D, c.workdir) == (3.0, False, 128, "12")


def test_dependent_defaults_follow_unless_set():
  c = parse("--config.model.D=128", "--config.opt.peak_learning_rate=0.02")
  assert c.model.F == 512
  assert c.opt.final_learning_rate == pytest.approx(0.002)
  c = parse("--config.opt.perturbed_dtype=bfloat16", "--config.opt.rho_warmup_steps=7")
  assert (c.model.dtype, c.opt.warmup_steps) == ("float32", 60)
  c = parse("--config.model.dtype=bfloat16", "--config.opt.method=sam")
  assert (c.opt.perturbed_dtype, c.wandb.group) == ("bfloat16", "sam")
  c = parse("--config.model.F=100", "--config.model.D=128", "--config.opt.final_learning_rate=0.0")
  assert (c.model.F, c.opt.final_learning_rate) == (100, 0.0)


def test_arguments_of_the_file():
  assert parse(file=QUICKSTART + ":size=2M,method=adamw").model.D == 256


@pytest.mark.parametrize(
  "argv, words",
  [
    (["--config.opt.peak_learnin_rate=1"], ["opt.peak_learning_rate"]),
    (["--config.batchsize=1"], ["batch_size"]),
    (["--config.batch_size=many"], ["batch_size", "int"]),
    (["--config.batch_size=1.5"], ["batch_size", "int"]),
    (["--config.data.repeat=maybe"], ["data.repeat", "bool"]),
    (["--config.opt.peak_learning_rate=fast"], ["float"]),
    (["--config.opt=3"], ["opt"]),
    (["--config.model.H=7"], ["model.D=64", "model.H=7"]),
    (["--config.grad_accumulation_steps=5"], ["batch_size=16", "grad_accumulation_steps=5"]),
    (["--config.opt.warmup_steps=601"], ["warmup_steps=601", "num_train_steps=600"]),
    (["--config.opt.decay_type=cosin"], ["cosine"]),
    (["--config.opt.base=adam"], ["adamw"]),
    (["--config.model.N=0"], ["model.N=0"]),
    (["--config.seed=5000000000"], ["seed=5000000000", "2**32"]),
    (["--config.workdir="], ["workdir"]),
    (["--config.opt.weight_decay_params=("], ["regex"]),
    (["--steps=3"], ["--steps=3", "--config"]),
  ],
)
def test_mistakes_are_named_in_one_line(argv, words):
  with pytest.raises(UsageError) as e:
    parse(*argv)
  assert "\n" not in str(e.value)
  for word in words:
    assert word in str(e.value)


@pytest.mark.parametrize(
  "file, words",
  [
    ("configs/quickstat.py", ["quickstart.py"]),
    ("nowhere/x.py", ["nowhere"]),
    (QUICKSTART + ":size=3M", ["2M"]),
    (QUICKSTART + ":sise=2M", ["size"]),
    (QUICKSTART + ":size", ["size=VALUE"]),
    (QUICKSTART + ":method=adam", ["adamw"]),
  ],
)
def test_wrong_files_and_arguments(file, words):
  with pytest.raises(UsageError, match=".*".join(map(re.escape, words))):
    parse(file=file)


def test_a_broken_config_file_is_named(tmp_path):
  file = tmp_path / "broken.py"
  file.write_text(
    "from nanosam import config\n"
    "def get_config(arg):\n"
    "  c = config.default()\n"
    "  c.opt.rhoo = 1\n"
    "  return c\n"
  )
  with pytest.raises(UsageError, match=r"broken\.py, line 4:.*rhoo") as raised:
    parse(file=str(file))
  assert len(str(raised.value)) < 400
  file.write_text("def get_config(arg) return 1")
  with pytest.raises(UsageError, match=r"broken\.py.*SyntaxError"):
    parse(file=str(file))
  for value in ("None", "{}"):
    file.write_text(f"def get_config(arg): return {value}")
    with pytest.raises(UsageError, match="get_config returned"):
      parse(file=str(file))
  (tmp_path / "notes.md").write_text("")
  with pytest.raises(UsageError, match=r"not a \.py file"):
    parse(file=str(tmp_path / "notes.md"))
  file.write_text("x = 1")
  with pytest.raises(UsageError, match="get_config"):
    parse(file=str(file))


def test_no_config_at_all():
  with pytest.raises(UsageError, match="--config="):
    config_lib.from_command_line(["train"])


def test_help_lists_every_key(capsys):
  train.main(["train", "--help"])
  said = capsys.readouterr().out
  assert "--config=configs/FILE.py" in said
  assert all(f"--config.{key}=" in said for key in config_lib.flat(config_lib.default()))


def test_changed_keys_ignore_what_does_not_change_the_result():
  old = config_lib.to_dict(parse())
  new = config_lib.to_dict(
    parse(
      "--config.opt.b2=0.5", "--config.mesh.fsdp=1", "--config.workdir=x", "--config.max_to_keep=9"
    )
  )
  assert config_lib.changed_keys(old, new) == ["opt.b2: 0.98 -> 0.5"]
  assert config_lib.changed_keys(json.loads(json.dumps(old)), old) == []
  del old["opt"]["phi"]  # as if the key had come later
  assert config_lib.changed_keys(old, new) == ["opt.b2: 0.98 -> 0.5"]


def test_keys_that_were_removed_do_not_count_unless_they_changed_the_result():
  new = config_lib.to_dict(parse())
  old = json.loads(json.dumps(new))
  old["compilation_cache"] = "off"
  old["opt"]["muon_beta"] = config_lib.REMOVED["opt.muon_beta"]
  assert config_lib.current(old) == new
  assert config_lib.changed_keys(old, new) == []
  assert runs.run_id(old) == runs.run_id(new)
  old["opt"]["muon_beta"] = 0.9
  assert config_lib.changed_keys(old, new) == ["opt.muon_beta: 0.9 -> None"]
  assert runs.run_id(old) != runs.run_id(new)


def test_device_divisibility_says_what_would_work():
  c = parse("--config.batch_size=12", "--config.grad_accumulation_steps=2")
  check_devices(c, 3)
  with pytest.raises(UsageError, match="multiple of 8"):
    check_devices(c, 8)


@pytest.mark.parametrize("size", [s for s in config_lib.SIZES if s != "mini"])
def test_chinchilla_lengths(size):
  c = parse(file=f"configs/chinchilla.py:size={size}")
  model = Transformer(model_config(c, config_lib.PAPER_VOCABULARY))
  params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, c.model.L), jnp.int32))
  total = sum(x.size for x in jax.tree.leaves(params))
  assert c.opt.num_train_steps == round(20 * total / (256 * 512))
  layers = parse(file=f"configs/chinchilla.py:size={size},count=non_embedding")
  assert layers.opt.num_train_steps == round(20 * 12 * c.model.N * c.model.D**2 / (256 * 512))


def test_paper_settings():
  c = parse(file="configs/fixed_length.py:size=1208M,method=sam,activation=relu")
  assert (c.batch_size, c.model.L, c.opt.num_train_steps) == (256, 512, 10_000)
  assert (c.opt.peak_learning_rate, c.opt.weight_decay) == (1e-3, 0.1)
  assert (c.opt.b1, c.opt.b2, c.opt.eps, c.opt.warmup_steps) == (0.9, 0.98, 1e-9, 1000)
  assert (c.opt.rho_schedule, c.model.activation) == ("warmup", "relu")
  assert c.opt.final_learning_rate == pytest.approx(1e-4)


def test_single_gpu_splits_the_batch():
  c = parse(file="configs/single_gpu.py:size=2M,micro=64,deterministic=True")
  assert (c.batch_size, c.grad_accumulation_steps, c.deterministic) == (256, 4, True)


@pytest.mark.parametrize("micro, near", [(30, "16 or 32"), (0, "1 or 2"), (1000, "128 or 256")])
def test_a_micro_that_does_not_divide_the_batch_is_refused(micro, near):
  with pytest.raises(UsageError, match=f"micro={micro} does not divide a batch of 256: {near}"):
    parse(file=f"configs/single_gpu.py:micro={micro}")


@pytest.mark.parametrize(
  "key, value, words",
  [
    ("opt.perturbed_dtype", "float32", "16-bit types: .*opt.perturbed_dtype=float32"),
    ("opt.method", "penalty_sam", "penalty_sam differentiates twice: set model.attention=xla"),
  ],
)
def test_what_cudnn_cannot_do_is_refused(key, value, words):
  with pytest.raises(UsageError, match=words):
    parse(f"--config.{key}={value}", file="configs/single_gpu.py:method=sam,attention=cudnn")
