"""Numbers that are not finite: noticed, counted, and treated as the policy says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.steps import bad_data, bad_params, make_step, steps

from nanosam.optim import guard
from nanosam.optim.gradient import Estimate
from nanosam.optim.passes import Passes


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_guard_refuses_bad_data_and_goes_on(tiny_config, value, devices):
  c = tiny_config
  c.guard.policy = "skip"
  state, history = steps(c, 3, devices, change=bad_data(value))
  assert [int(h["guard/nonfinite"]) for h in history] == [0, 1, 1]
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
  assert np.isfinite(history[2]["train/loss"])


def test_guard_that_aborts_stays_where_the_trouble_began(tiny_config):
  one_step, _ = steps(tiny_config, 1)
  state, history = steps(tiny_config, 4, change=bad_data(np.nan))
  assert [int(h["guard/nonfinite"]) for h in history] == [0, 1, 1, 1]
  jax.tree.map(np.testing.assert_array_equal, state.params, one_step.params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_guard_sees_bad_parameters(tiny_config, value):
  _, history = steps(tiny_config, 1, start=bad_params(value))
  assert history[0]["guard/nonfinite"] == 1


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_guard_sees_one_bad_entry_of_a_gradient_behind_a_finite_loss(
  tiny_config, value, devices, monkeypatch
):
  plain = Passes.first

  def spoiled(self, path=None):
    loss, g, kept = plain(self, path)
    g = {**g, "embed": g["embed"].at[3, 5].set(value)}
    return loss, g, kept

  c = tiny_config
  monkeypatch.setattr(Passes, "first", spoiled)
  start = jax.device_get(make_step(c, devices).init(0).params)
  state, history = steps(c, 1, devices)
  assert np.isfinite(history[0]["train/loss"])
  assert history[0]["guard/nonfinite"] == 1
  assert not np.isfinite(history[0]["grad_norm/embed"])
  assert np.isfinite(history[0]["grad_norm/out_norm"])
  jax.tree.map(np.testing.assert_array_equal, state.params, start)


@pytest.mark.parametrize("policy", ["plain", "skip", "abort"])
def test_a_second_pass_that_alone_goes_wrong(tiny_config, policy):
  """A radius so large that theta' overflows: its own counter, its own policy."""
  c = tiny_config
  plain, _ = steps(c, 1)
  c.opt.update(method="sam", rho=1e38)
  c.guard.perturbed = policy
  start = make_step(c).init(0)
  state, history = steps(c, 1)
  assert history[0]["guard/perturbed_nonfinite"] == 1
  assert history[0]["guard/nonfinite"] == 0
  expected = plain.params if policy == "plain" else start.params
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)


@pytest.mark.parametrize("perturbed", ["plain", "skip", "abort"])
def test_a_bad_gradient_where_rho_is_scheduled_to_be_zero_is_no_second_pass(
  tiny_config, perturbed, monkeypatch
):
  plain = Passes.first

  def spoiled(self, path=None):
    loss, g, kept = plain(self, path)
    return loss, {**g, "embed": g["embed"].at[3, 5].set(np.nan)}, kept

  c = tiny_config
  c.opt.update(method="sam", rho=0.5, rho_schedule="piecewise", rho_pieces="0.8:1")
  c.guard.update(policy="skip", perturbed=perturbed)
  monkeypatch.setattr(Passes, "first", spoiled)
  start = jax.device_get(make_step(c).init(0).params)
  state, history = steps(c, 1)
  assert history[0]["guard/nonfinite"] == 1 and history[0]["guard/perturbed_nonfinite"] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, start)


def test_a_plain_gradient_that_is_bad_where_nothing_is_perturbed_is_no_second_pass(tiny_config):
  """opt.perturb_params leaves b out: then eps is fine, and only the gradient shows the trouble."""
  tiny_config.guard.update(policy="abort", perturbed="plain")
  bad = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}
  estimated = Estimate(bad, bad, {"train/loss": jnp.ones(())}, unperturbed=0.0)
  verdict = guard.judge(tiny_config.guard, estimated, guard.Counts.zero())
  assert not verdict.accept
  assert (verdict.counts.nonfinite, verdict.counts.perturbed_nonfinite) == (1, 0)
