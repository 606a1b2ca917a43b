"""Critical sharpness against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nanosam.curvature import critical
from nanosam.optim import base, schedules


def counted(loss):
  calls = []

  def count(eta):
    calls.append(eta)
    return float(loss(eta))

  return count, calls


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_quadratic_losses_have_a_closed_form(scale):
  """eta_c = 2 g^T d / d^T H d, along the gradient and along another direction."""
  rng = np.random.default_rng(0)
  A = rng.normal(size=(8, 8))
  H, x = scale * (A @ A.T), rng.normal(size=8)
  g = H @ x
  for d in (g, g / (np.abs(g) + scale)):
    loss, calls = counted(lambda eta, d=d: (x - eta * d) @ H @ (x - eta * d) / 2 + 3)
    eta = critical.step_size(loss, g @ d)
    assert eta == pytest.approx(2 * (g @ d) / (d @ H @ d), rel=critical.TOLERANCE)
    assert len(calls) <= 10
    exact = critical.step_size(loss, g @ d, tolerance=1e-6)
    assert exact == pytest.approx(2 * (g @ d) / (d @ H @ d), rel=1e-5)
  assert 2 / critical.step_size(loss, g @ d) > 0


@pytest.mark.parametrize("power", [1.5, 4, 8])
def test_a_loss_that_is_no_parabola(power):
  """-eta + eta^power rises above 0 at eta = 1, wherever the parabola near 0 says it does."""
  loss, calls = counted(lambda eta: 3 - eta + eta**power)
  assert critical.step_size(loss, 1.0) == pytest.approx(1, rel=critical.TOLERANCE)
  assert len(calls) <= 12


def test_overflow_is_a_rise():
  loss, _ = counted(lambda eta: np.nan if eta > 0.7 else 2 - eta)
  assert critical.step_size(loss, 1.0) == pytest.approx(0.7, rel=critical.TOLERANCE)


def test_where_there_is_none():
  assert critical.step_size(lambda eta: 2 + eta, -1.0) is None  # no descent
  assert critical.step_size(lambda eta: 2 - eta, 1.0) is None  # without end
  assert critical.step_size(lambda eta: np.nan, 1.0) is None


@pytest.mark.parametrize("name", sorted(base.BASES))
def test_updates_are_the_optimizers_own_over_the_learning_rate(tiny_config, name):
  opt = tiny_config.opt
  opt.base, opt.weight_decay, opt.weight_decay_params, opt.average = name, 0.1, ".", "ema"
  params = {"a": {"kernel": jax.random.normal(jax.random.key(0), (4, 6))}}
  g = jax.tree.map(lambda x: 0.1 * x**2, params)
  tx = base.make_base(opt, params)
  state = tx.update(g, tx.update(g, tx.init(params), params)[1], params)[1]
  lr = float(schedules.learning_rate(opt)(base.updates_made(state)))
  assert lr > 0
  updates, _ = tx.update(g, state, params)
  d = critical.update_direction(opt, params)(g, state, params)
  for found, update in zip(*map(jax.tree.leaves, (d, updates)), strict=True):
    np.testing.assert_allclose(found, -update / lr, rtol=2e-5, atol=1e-7)
  # In the first step of a warmup from 0, too, where the update itself is nothing.
  opt.init_learning_rate = 0.0
  first = base.make_base(opt, params).init(params)
  assert float(optax.tree.norm(critical.update_direction(opt, params)(g, first, params))) > 0
  assert jnp.all(params["a"]["kernel"] == jax.random.normal(jax.random.key(0), (4, 6)))
