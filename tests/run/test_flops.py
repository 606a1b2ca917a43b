"""Counted FLOPs against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from helpers.steps import VOCAB, make_step
from jax._src.cudnn import fused_attention_stablehlo

from nanosam.run import flops


def test_flops_multiply_loops():
  x = jnp.zeros((4, 8))
  w = jnp.zeros((8, 8))

  def loop(x):
    return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

  def branches(p, x):
    return jax.lax.cond(p, lambda x: loop(x), lambda x: x @ w, x)

  one = 2 * 4 * 8 * 8
  assert flops.count(jax.make_jaxpr(lambda x: x @ w)(x)) == one
  assert flops.count(jax.make_jaxpr(jax.jit(loop))(x)) == 5 * one
  assert flops.count(jax.make_jaxpr(branches)(True, x)) == 5 * one
  assert flops.count(jax.make_jaxpr(branches)(True, x), branch=min) == one
  unused = jax.make_jaxpr(lambda x: (x @ w, x + 1)[1])(x)
  assert flops.count(unused) == 0


@pytest.mark.parametrize("method", ["adamw", "precond_func_sam"])
@pytest.mark.parametrize("remat", [False, True])
def test_cudnns_attention_counts_like_the_plain_one(tiny_config, monkeypatch, method, remat):
  """It is one primitive, which can be traced where there is no GPU."""
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
  monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
  monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: 0)
  c = tiny_config
  c.model.update(dtype="bfloat16", remat=remat)
  c.opt.method = method
  plain = flops.count(make_step(c).trace().jaxpr)
  passes = 1 if method == "adamw" else 2
  scores = 2 * c.batch_size * c.model.L**2 * c.model.D * c.model.N
  again = passes * scores if remat else 0  # once more, a few heads at a time
  c.model.attention = "cudnn"
  assert flops.count(make_step(c).trace().jaxpr) == plain - again


def test_peaks_are_of_the_longest_name():
  peaks = [flops.peak_flops(f"NVIDIA H100 {name}") for name in ("80GB HBM3", "PCIe", "NVL")]
  assert peaks == [989e12, 756e12, 835e12]
  assert flops.peak_flops("cpu") is None


def test_flops_of_a_step_are_the_books(tiny_config):
  """3b + 3u for AdamW and twice that for SAM; b counts attention's full L x L."""
  c = tiny_config
  m, tokens = c.model, c.batch_size * c.model.L
  c.head.chunk = m.L // 2
  b = m.N * (8 * m.D**2 + 4 * m.D * m.F + 4 * m.L * m.D)
  u = 2 * m.D * VOCAB
  adamw = flops.count(make_step(c).trace().jaxpr)
  assert adamw == 3 * (b + u) * tokens
  c.opt.method = "sam"
  assert flops.count(make_step(c).trace().jaxpr) == 2 * adamw
  c.opt.method, c.head.residual = "func_sam", "store"
  assert flops.count(make_step(c).trace().jaxpr) == (6 * b + 5 * u) * tokens
  c.head.residual = "recompute"
  assert flops.count(make_step(c).trace().jaxpr) == 2 * adamw
