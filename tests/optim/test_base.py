"""Base optimizers: what optax makes of the same settings, decay, moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.batches import random_batch
from helpers.steps import VOCAB, bad_data, batches, make_step, steps

from nanosam.optim import base, schedules
from nanosam.system.errors import UsageError


def test_adamw_is_optax_adamw_with_the_configs_settings(tiny_config):
  c = tiny_config
  c.opt.update(weight_decay=0.3, clip_by_global_norm=0.01, b2=0.9, eps=1e-6)
  state, _ = steps(c)
  train_step = make_step(c)
  rate = schedules.learning_rate(c.opt)
  tx = optax.chain(
    optax.clip_by_global_norm(0.01),
    optax.adamw(rate, b1=0.9, b2=0.9, eps=1e-6, weight_decay=0.3),
  )
  params = train_step.init(0).params
  opt_state = tx.init(params)

  @jax.jit
  def reference(params, opt_state, batch):
    def loss(p):
      logits = jnp.einsum("bld,vd->blv", train_step.model.hidden(p, batch), p["embed"])
      nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets_BxL)
      return jnp.sum(nll * batch.weights_BxL) / jnp.sum(batch.weights_BxL)

    updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for batch in batches(c, train_step.mesh, 3):
    params, opt_state = reference(params, opt_state, batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), state.params, params)


@pytest.mark.parametrize("name", list(base.BASES))
def test_every_base_learns(tiny_config, name):
  c = tiny_config
  c.opt.update(base=name, num_train_steps=30, warmup_steps=0)
  c.opt.peak_learning_rate = {"sgd": 0.3, "lion": 3e-3}.get(name, 1e-2)
  same = random_batch(0, c.batch_size, c.model.L, VOCAB)
  _, history = steps(c, 30, change=lambda i, b: same)
  assert history[-1]["train/loss"] < history[0]["train/loss"] - 0.3


@pytest.mark.parametrize("name", list(base.BASES))
def test_weight_decay_is_decoupled_and_masked(tiny_config, name):
  c = tiny_config
  c.opt.update(base=name, weight_decay=0.5, weight_decay_params="mlp")
  train_step = make_step(c)
  params = train_step.init(0).params
  zero = optax.tree.zeros_like(params)
  updates, _ = train_step.base.update(zero, train_step.base.init(params), params)
  rate = float(schedules.learning_rate(c.opt)(0))
  mlp, rest = updates["layer_0"]["mlp"]["up"]["kernel"], updates["layer_0"]["attention"]
  np.testing.assert_allclose(mlp, -rate * 0.5 * params["layer_0"]["mlp"]["up"]["kernel"], rtol=1e-5)
  assert all((x == 0).all() for x in jax.tree.leaves(rest))


def test_moments_are_updated_with_the_final_gradient_only(tiny_config):
  c = tiny_config
  c.opt.update(method="sam", rho=0.5, b1=0.0)
  state, history = steps(c, 1)
  moments = base.moments(state.opt_state)
  np.testing.assert_allclose(optax.tree.norm(moments.mu), history[0]["opt/grad_norm"], rtol=1e-5)
  assert moments.steps == 1  # one more update, with any gradient, would show
  jax.tree.map(
    lambda m, v: np.testing.assert_allclose(v, (1 - c.opt.b2) * m**2, rtol=1e-5, atol=1e-12),
    moments.mu,
    moments.nu,
  )


def test_zero_gradient_from_a_fresh_state_is_only_decay(tiny_config):
  c = tiny_config
  c.opt.update(method="precond_func_sam", rho=0.5)
  empty = lambda i, b: b._replace(weights_BxL=b.weights_BxL * 0)  # noqa: E731
  before = make_step(c).init(0).params
  state, history = steps(c, 1, change=empty)
  rate = float(schedules.learning_rate(c.opt)(0))
  assert history[0]["guard/no_perturbation"] == 1 and history[0]["guard/nonfinite"] == 0
  jax.tree.map(
    lambda new, old: np.testing.assert_allclose(new, old * (1 - rate * 0.1), rtol=1e-5),
    state.params,
    before,
  )


@pytest.mark.parametrize("key", ["opt.perturb_params", "opt.weight_decay_params"])
def test_a_pattern_that_matches_no_parameter_is_refused(tiny_config, key):
  tiny_config.opt[key.removeprefix("opt.")] = "kernal"
  with pytest.raises(UsageError, match=f"{key}=kernal matches no parameter; .*out_norm/scale"):
    make_step(tiny_config)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_averaged_weights_by_hand_and_training_does_not_notice(tiny_config, kind, devices):
  c = tiny_config
  plain, _ = steps(c, 6, devices)
  c.opt.update(average=kind, average_decay=0.6, average_fraction=1 - 3 / c.opt.num_train_steps)
  train_step = make_step(c, devices)
  state, step = train_step.init(0), train_step.trace().lower().compile()
  seen = []
  for batch in batches(c, train_step.mesh, 6):
    state, _ = step(state, batch)
    seen.append(jax.device_get(state.params))
  if kind == "ema":
    expected = seen[0]
    for n, params in enumerate(seen[1:], 2):
      w = max(0.4, 1 / n)
      expected = jax.tree.map(lambda a, p, w=w: (1 - w) * a + w * p, expected, params)
  else:
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *seen[3:])
  found = jax.device_get(base.averaged(state.opt_state))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
  jax.tree.map(np.testing.assert_array_equal, seen[-1], plain.params)
  assert base.averaged(plain.opt_state) is None


def test_a_rejected_step_does_not_enter_the_average(tiny_config):
  c = tiny_config
  c.opt.average, c.guard.policy = "ema", "skip"
  good, _ = steps(c, 1)
  state, _ = steps(c, 2, change=bad_data(np.nan))
  jax.tree.map(
    np.testing.assert_array_equal, base.averaged(state.opt_state), base.averaged(good.opt_state)
  )


def test_block_rates_multiply_the_learning_rate_and_its_decay(tiny_config):
  """After one step of each: every parameter has moved by its factor."""
  o, params = tiny_config.opt, make_step(tiny_config).init(0).params
  g = jax.tree.map(lambda x: x + 0.1, params)

  def moved():
    tx = base.make_base(o, params)
    return tx.update(g, tx.init(params), params)[0]

  plain = moved()
  o.block_rates = "published"
  factors = {"query": 8, "key": 8, "value": 4, "out": 4, "up": 6, "down": 6}
  layer = {"attention": {}, "mlp": {}, "norm1": {"scale": 1}, "norm2": {"scale": 1}}
  for name, factor in factors.items():
    layer["mlp" if name in ("up", "down") else "attention"][name] = {"kernel": factor}
  expected = {"embed": 10, "pos_embed": 10, "out_norm": {"scale": 1}, "layer_0": layer}
  found = jax.tree.map(lambda a, b: float(jnp.mean(a / b)), moved(), plain)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
  o.block_rates = "mpl:6"
  with pytest.raises(base.MethodError, match="matches no parameter"):
    moved()
