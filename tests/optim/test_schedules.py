"""The learning rate and rho over training."""

import jax
import numpy as np
import pytest
from helpers.steps import bad_data, batches, make_step, steps

from nanosam.optim import schedules


@pytest.mark.parametrize(
  "decay, expected",
  [
    ("cosine", [0.1, 1.0, 0.55, 0.1]),
    ("linear", [0.1, 1.0, 0.55, 0.1]),
    ("rsqrt", [0.1, 1.0, (11 / 56) ** 0.5, (11 / 101) ** 0.5]),
    ("constant", [0.1, 1.0, 1.0, 1.0]),
    ("wsd", [0.1, 1.0, 1.0, 0.1]),
  ],
)
def test_schedules_at_their_corners(tiny_config, decay, expected):
  o = tiny_config.opt
  o.update(decay_type=decay, peak_learning_rate=1.0, warmup_steps=10, num_train_steps=100)
  schedule = schedules.learning_rate(o)
  np.testing.assert_allclose([schedule(s) for s in (0, 10, 55, 100)], expected, rtol=1e-5)
  np.testing.assert_allclose(schedule(5), 0.55, rtol=1e-5)


def test_rho_schedules(tiny_config):
  o = tiny_config.opt
  o.update(rho=0.4, num_train_steps=100, warmup_steps=10, rho_warmup_steps=20)

  def at(kind, *points):
    o.rho_schedule = kind
    schedule = schedules.rho(o)
    return [float(schedule(s)) for s in points]

  assert schedules.rho(o) == 0.4
  np.testing.assert_allclose(at("warmup", 0, 10, 20, 90), [0, 0.2, 0.4, 0.4], rtol=1e-6)
  np.testing.assert_allclose(at("lr", 0, 10, 100), [0.04, 0.4, 0.04], rtol=1e-5)
  o.rho_pieces = "0.5:1,0.8:0.5"
  np.testing.assert_allclose(at("piecewise", 49, 50, 79, 80), [0, 0.4, 0.4, 0.2], rtol=1e-6)
  np.testing.assert_allclose(at("late", 0, 79, 80, 99), [0, 0, 0.4, 0.4], rtol=1e-6)
  np.testing.assert_allclose(at("mid", 39, 40, 59, 60), [0, 0.4, 0.4, 0], rtol=1e-6)


def test_static_zero_is_adamws_trajectory_bit_for_bit(tiny_config):
  plain, _ = steps(tiny_config, 5)
  tiny_config.opt.update(method="precond_func_sam", rho=0.0)
  zero, _ = steps(tiny_config, 5)
  jax.tree.map(np.testing.assert_array_equal, plain.params, zero.params)


def test_scheduled_zero_follows_adamw_until_it_ends(tiny_config):
  c = tiny_config
  c.opt.num_train_steps = 50
  plain, _ = steps(c, 40)
  c.opt.update(method="func_sam", rho=0.5, rho_schedule="piecewise", rho_pieces="0.8:1")
  train_step = make_step(c)
  state, step = train_step.init(0), train_step.trace().lower().compile()
  for i, batch in enumerate(batches(c, train_step.mesh, 42)):
    if i == 40:
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        plain.params,
        jax.device_get(state.params),
      )
    state, metrics = step(state, batch)
    assert (metrics["opt/eps_norm"] > 0) == (i >= 40)


def test_schedules_go_by_the_updates_that_were_made(tiny_config):
  c = tiny_config
  c.guard.policy = "skip"
  c.opt.update(warmup_steps=4, method="sam", rho=0.5, rho_schedule="lr")
  _, history = steps(c, 3, change=bad_data(np.nan))
  _, good = steps(c, 2)
  for key in ("opt/lr", "opt/rho"):  # the second step was rejected: the third is its repetition
    assert [h[key] for h in history] == [good[0][key], good[1][key], good[1][key]]
