"""model.attention=auto: cuDNN where it works, and what is said where it is missing."""

from types import SimpleNamespace

import jax
import pytest

from nanosam.model import sharding
from nanosam.run import attention
from nanosam.run.step import TrainStep


def on(capability):
  """A mesh of one device that says it is a GPU of this kind."""
  return SimpleNamespace(devices=SimpleNamespace(flat=[SimpleNamespace(**capability)]))


@pytest.mark.parametrize(
  "capability, cudnn, changes, expected",
  [
    ({"compute_capability": "8.0"}, True, {}, "cudnn"),
    ({"compute_capability": "9.0"}, True, {}, "cudnn"),
    ({"compute_capability": "7.0"}, True, {}, "xla"),
    ({"compute_capability": "gfx90a"}, True, {}, "xla"),
    ({"compute_capability": "8.0"}, False, {}, "xla"),
    ({"compute_capability": "8.0"}, True, {"opt.method": "penalty_sam"}, "xla"),
    ({"compute_capability": "8.0"}, True, {"opt.perturbed_dtype": "float32"}, "xla"),
    ({"compute_capability": "8.0"}, True, {"model.attention": "plain"}, "plain"),
    ({}, True, {}, "xla"),
  ],
)
def test_what_auto_is(tiny_config, monkeypatch, capability, cudnn, changes, expected):
  monkeypatch.setattr(attention, "_has_cudnn", lambda: cudnn)
  c = tiny_config
  c.model.attention, c.model.dtype = "auto", "bfloat16"
  for key, value in changes.items():
    section, name = key.split(".")
    c[section][name] = value
  before = c.model.attention
  assert attention.resolved(c, on(capability)).model.attention == expected
  assert c.model.attention == before, "the record keeps what was asked for"


def test_here_it_is_xlas_and_the_same_program(tiny_config):
  """Asks the real library, which on a CPU has no cuDNN."""
  mesh, texts = sharding.make_mesh(1, 1, jax.devices()[:1]), []
  for name in ("auto", "xla"):
    tiny_config.model.attention = name
    step = TrainStep(tiny_config, 64, mesh)
    assert step.attention == "xla"
    texts.append(str(step.trace().jaxpr))
  assert texts[0] == texts[1]


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there(commands, whole, platform):
  for command, words in (("train", ["--config=tests/helpers/tiny_config.py"]), ("sample", [])):
    outcome = commands.__class__(commands.cache, {"JAX_PLATFORMS": platform})(
      command, *words, f"--{'config.' if words else ''}workdir={whole}"
    )
    assert outcome.code == 1
    outcome.says_in_one_line(f"JAX_PLATFORMS={platform}", "set JAX_PLATFORMS=cpu")


def test_attention_that_is_not_there(commands, tmp_path):
  outcome = commands.train(
    tmp_path / "run", model__attention="cudnn", model__dtype="bfloat16", opt__rho=0.1
  )
  assert outcome.code == 1
  outcome.says_in_one_line("set model.attention=auto", "cuDNN is not detected")
