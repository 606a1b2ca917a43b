import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanosam import config as config_lib
from nanosam.model import transformer
from nanosam.model.classifier import model_config

CFG = transformer.ModelConfig(
  **{"D": 16, "H": 2, "L": 8, "N": 2, "F": 32, "V": 50},
  **{"activation": "gelu", "tied": True, "dtype": jnp.float32},
  **{"remat": False, "scan_layers": False, "attention": "plain"},
  **{"kind": "decoder", "image_size": 0, "patch_size": 0, "pooling": "", "head_scale": 1.0},
)


def tokens(B=2, L=8, seed=0):
  return jax.random.randint(jax.random.key(seed), (B, L), 0, CFG.V)


@functools.partial(jax.jit, static_argnums=0)
def apply(cfg, params, x_BxL, segments_BxL=None):
  return transformer.Transformer(cfg).apply({"params": params}, x_BxL, segments_BxL)


@functools.partial(jax.jit, static_argnums=0)
def init(cfg, seed=0):
  return transformer.Transformer(cfg).init(jax.random.key(seed), tokens())["params"]


def with_(**changes):
  return dataclasses.replace(CFG, **changes)


def test_a_row_that_many_tokens_share_gets_its_whole_gradient_in_bf16():
  rng = np.random.default_rng(0)
  x_BxL = np.where(rng.random((64, 128)) < 0.5, 3, rng.integers(0, 50, (64, 128)))
  weight = 1 + rng.normal(size=(64, 128, 16))

  def gradient(dtype):
    cfg = with_(L=128, dtype=dtype)
    params = transformer.Transformer(with_(L=128)).init(jax.random.key(0), x_BxL)["params"]
    return jax.grad(lambda p: jnp.sum(apply(cfg, p, x_BxL) * weight))(params)["embed"][3]

  exact = gradient(jnp.float32)
  error = np.linalg.norm(gradient(jnp.bfloat16) - exact) / np.linalg.norm(exact)
  assert error < 0.025  # summed in bf16 it is about 0.07


# Non-embedding counts from the paper's names; 12 x layers x width^2.
@pytest.mark.parametrize(
  "size, millions",
  [("2M", 2.36), ("23.9M", 23.9), ("42.5M", 42.5), ("117.9M", 118.0), ("1208M", 1208)],
)
def test_paper_sizes(size, millions):
  c = config_lib.default(size=size)
  cfg = model_config(c, outputs=32_101)
  params = jax.eval_shape(
    lambda: transformer.Transformer(cfg).init(jax.random.key(0), tokens(1, 512))
  )
  count = transformer.non_embedding_count(params["params"])
  assert count == 12 * cfg.N * cfg.D**2
  assert count / 1e6 == pytest.approx(millions, rel=2e-3)


def test_no_token_sees_its_future():
  params = init(CFG)
  x_BxL = tokens()
  changed = x_BxL.at[:, 5].set((x_BxL[:, 5] + 1) % CFG.V)
  before, after = apply(CFG, params, x_BxL), apply(CFG, params, changed)
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert (before[:, 5:] != after[:, 5:]).any(axis=(0, 2)).all()


def test_no_token_sees_another_document():
  params = init(CFG)
  x_BxL = tokens()
  segments_BxL = jnp.where(jnp.arange(8)[None, :] < 4, 1, 2) * jnp.ones((2, 1), jnp.int32)
  changed = x_BxL.at[:, 1].set((x_BxL[:, 1] + 1) % CFG.V)
  before, after = (apply(CFG, params, x, segments_BxL) for x in (x_BxL, changed))
  np.testing.assert_array_equal(before[:, 4:], after[:, 4:])
  assert (apply(CFG, params, changed)[:, 4:] != apply(CFG, params, x_BxL)[:, 4:]).any()


def test_scanned_layers_compute_the_same():
  params = init(CFG)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), params["layer_0"], params["layer_1"])
  scanned = {k: v for k, v in params.items() if not k.startswith("layer")} | {"layers": stacked}
  cfg = with_(scan_layers=True)
  assert jax.tree.map(jnp.shape, init(cfg)) == jax.tree.map(jnp.shape, scanned)
  np.testing.assert_allclose(apply(cfg, scanned, tokens()), apply(CFG, params, tokens()), atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_remat_changes_nothing_but_memory(scan, monkeypatch):
  monkeypatch.setattr(transformer, "HEADS_AT_A_TIME", 1)  # of two
  cfg = with_(scan_layers=scan)
  params = init(cfg)

  def grad(cfg):
    return jax.jit(jax.grad(lambda p: jnp.sum(apply(cfg, p, tokens()) ** 2)))(params)

  a, b = grad(cfg), grad(with_(scan_layers=scan, remat=True))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize("segments", [False, True])
def test_attention_implementations_agree(segments):
  params = init(CFG)
  segments_BxL = jnp.repeat(jnp.array([[1, 2]]), 4, axis=1) * jnp.ones((2, 1), jnp.int32)
  segments_BxL = segments_BxL if segments else None
  plain = apply(CFG, params, tokens(), segments_BxL)
  xla = apply(with_(attention="xla"), params, tokens(), segments_BxL)
  np.testing.assert_allclose(plain, xla, atol=1e-5)


def test_bf16_computes_near_fp32_and_keeps_fp32_parameters():
  cfg = with_(dtype=jnp.bfloat16)
  params = init(cfg)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  low, full = apply(cfg, params, tokens()), apply(CFG, params, tokens())
  assert low.dtype == jnp.bfloat16
  np.testing.assert_allclose(low.astype(jnp.float32), full, atol=0.1)
  assert (low.astype(jnp.float32) != full).any()


def test_untied_has_its_own_unembedding():
  tied, untied = init(CFG), init(with_(tied=False))
  assert transformer.unembedding(tied) is tied["embed"]
  assert transformer.unembedding(untied) is untied["unembed"]
  assert (untied["unembed"] != untied["embed"]).any()


def test_activation():
  params = init(CFG)
  assert (apply(CFG, params, tokens()) != apply(with_(activation="relu"), params, tokens())).any()
