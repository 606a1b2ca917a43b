import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.batches import random_batch

from nanosam.model import head

vjp = jax.jit(head.vjp, static_argnames=("chunk", "keep"))
token_losses = jax.jit(head.token_losses, static_argnames="chunk")
B, L, D, V = 3, 12, 8, 50


def problem(seed=0):
  keys = jax.random.split(jax.random.key(seed), 4)
  here = head.Point(jax.random.normal(keys[0], (B, L, D)), jax.random.normal(keys[1], (V, D)))
  there = head.Point(
    here.h_BxLxD + 0.1 * jax.random.normal(keys[2], (B, L, D)),
    here.W_VxD + 0.1 * jax.random.normal(keys[3], (V, D)),
  )
  batch = random_batch(seed, B, L, V)
  return here, there, head.Targets(batch.targets_BxL, batch.weights_BxL / batch.weights_BxL.sum())


def dense_loss(logits_BxLxV, targets):
  logp = jax.nn.log_softmax(logits_BxLxV)
  nll_BxL = -jnp.take_along_axis(logp, targets.ids_BxL[..., None], -1)[..., 0]
  return jnp.sum(nll_BxL * targets.weights_BxL)


def logits(point):
  return jnp.einsum("bld,vd->blv", point.h_BxLxD, point.W_VxD)


@pytest.mark.parametrize("chunk", [1, 5, L, 0])
def test_chunked_equals_autodiff_of_the_dense_loss(x64, chunk):
  here, _, targets = problem()
  expected_loss, expected = jax.jit(jax.value_and_grad(lambda p: dense_loss(logits(p), targets)))(
    here
  )
  out = vjp([(1.0, here)], here, targets, chunk=chunk)
  np.testing.assert_allclose(out.losses[0], expected_loss, rtol=1e-12)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), out.gradient, expected)


@pytest.mark.parametrize("chunk", [1, 5, L])
def test_residual_of_one_point_at_another(x64, chunk):
  """The functional path: dL/dlogits here, the Jacobian there, and mixtures of residuals."""
  here, there, targets = problem()
  r_here, r_there = (jax.grad(dense_loss)(logits(point), targets) for point in (here, there))
  _, back = jax.vjp(logits, there)
  out = vjp([(0.25, here), (2.0, there)], there, targets, chunk=chunk)
  (expected,) = back(0.25 * r_here + 2.0 * r_there)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), out.gradient, expected)
  np.testing.assert_allclose(out.losses[1], dense_loss(logits(there), targets), rtol=1e-12)


def test_a_kept_residual_serves_a_second_pass(x64):
  here, there, targets = problem()
  kept = vjp([(1.0, here)], here, targets, chunk=5, keep=True).residual
  again = vjp([(1.0, kept)], there, targets, chunk=5)
  direct = vjp([(1.0, here)], there, targets, chunk=5)
  jax.tree.map(np.testing.assert_array_equal, again.gradient, direct.gradient)
  np.testing.assert_allclose(jnp.sum(kept.R_nxBxCxV, -1), 0.0, atol=1e-15)


def test_padding_changes_nothing():
  here, _, targets = problem()
  other = targets._replace(
    ids_BxL=jnp.where(targets.weights_BxL > 0, targets.ids_BxL, (targets.ids_BxL + 7) % V)
  )
  assert (other.ids_BxL != targets.ids_BxL).any()
  a, b = (vjp([(1.0, here)], here, t, chunk=5) for t in (targets, other))
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_token_losses_are_the_parts_of_the_loss():
  here, _, targets = problem()
  nll_BxL = token_losses(here, targets.ids_BxL, chunk=5)
  loss = vjp([(1.0, here)], here, targets, chunk=4).losses[0]
  np.testing.assert_allclose(jnp.sum(nll_BxL * targets.weights_BxL), loss, rtol=1e-6)


def test_forward_mode_works_through_the_head(x64):
  """Curvature needs the derivative of the gradient: no custom rule may be in the way."""
  here, there, targets = problem()
  direction = jax.tree.map(jnp.subtract, there, here)

  def gradient(point):
    return vjp([(1.0, point)], point, targets, chunk=5).gradient

  _, tangent = jax.jvp(gradient, (here,), (direction,))
  dense = jax.jit(jax.grad(lambda p: dense_loss(logits(p), targets)))
  _, expected = jax.jvp(dense, (here,), (direction,))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), tangent, expected)


def test_no_buffer_of_all_logits_in_the_compiled_program():
  here, _, targets = problem()

  def compiled(chunk):
    f = jax.jit(lambda p: vjp([(1.0, p)], p, targets, chunk=chunk))
    return f.lower(here).compile().as_text()

  def largest(text):
    shapes = re.findall(r"[fs](?:32|64)\[([\d,]+)\]", text)
    return max(np.prod([int(n) for n in s.split(",")]) for s in shapes)

  assert largest(compiled(0)) >= B * L * V  # the check sees one where there is one
  assert largest(compiled(4)) < B * L * V
