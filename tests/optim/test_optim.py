"""Base optimizers, schedules, and the step that joins them with a method."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.batches import random_batch

from nanosam.model import sharding
from nanosam.model.sharding import STACKED
from nanosam.optim import base, guard, schedules
from nanosam.optim.gradient import Estimate
from nanosam.optim.methods import METHODS
from nanosam.optim.passes import Passes
from nanosam.run import flops
from nanosam.run.step import TrainStep
from nanosam.run.validate import validate
from nanosam.system.errors import UsageError

VOCAB = 64


def make_step(c, devices=1):
  validate(c)
  mesh = sharding.make_mesh(1, -1, devices=jax.devices()[:devices])
  return TrainStep(c, VOCAB, mesh)


def batches(c, mesh, n, change=lambda i, b: b):
  for i in range(n):
    batch = change(i, random_batch(i, c.batch_size, c.model.L, VOCAB))
    yield sharding.to_devices(jax.tree.map(np.asarray, batch), mesh)


def steps(c, n=3, devices=1, change=lambda i, b: b, start=lambda state: state):
  train_step = make_step(c, devices)
  state, step = start(train_step.init(0)), train_step.trace().lower().compile()
  history = []
  for batch in batches(c, train_step.mesh, n, change):
    state, metrics = step(state, batch)
    history.append(jax.device_get(metrics))
  return jax.device_get(state), history


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


@pytest.mark.parametrize(
  "decay, expected",
  [
    ("cosine", [0.1, 1.0, 0.55, 0.1]),
    ("linear", [0.1, 1.0, 0.55, 0.1]),
    ("rsqrt", [0.1, 1.0, (10 / 55) ** 0.5, 0.1**0.5]),
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


def test_stacking_the_layers_changes_no_method(tiny_config):
  """Of those whose direction looks at each parameter by itself."""
  c = tiny_config
  c.opt.update(method="asam", rho=0.5)
  losses = []
  for c.model.scan_layers in (False, True):
    train_step = make_step(c)
    state = train_step.init(0)
    if not losses:
      same = jax.device_get(state.params)
      layers = [same.pop(f"layer_{i}") for i in range(c.model.N)]
      same[STACKED] = jax.tree.map(lambda *x: np.stack(x), *layers)
    else:
      state = state.replace(params=jax.device_put(same, train_step.state_shardings.params))
    step = train_step.trace().lower().compile()
    losses.append(step(state, next(batches(c, train_step.mesh, 1)))[1]["train/loss_perturbed"])
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize(
  "method, micro",
  [
    ("precond_func_sam", 2),
    *(pytest.param(name, micro, marks=pytest.mark.full) for name in METHODS for micro in (1, 2)),
  ],
)
def test_methods_agree_on_one_and_eight_devices(tiny_config, method, micro):
  c = tiny_config
  c.batch_size, c.grad_accumulation_steps = 16, micro
  c.opt.update(method=method, rho=0.3)
  (a, one), (b, eight) = steps(c, 3, devices=1), steps(c, 3, devices=8)
  names = {"train/loss", "train/loss_perturbed", "opt/eps_norm", "opt/grad_norm"} & set(one[0])
  for name in names:
    np.testing.assert_allclose([h[name] for h in eight], [h[name] for h in one], rtol=2e-4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), a.params, b.params)


def test_metrics_of_a_perturbed_step(tiny_config):
  c = tiny_config
  c.opt.update(method="precond_func_sam", rho=0.3)
  _, history = steps(c, 1)
  m = history[0]
  count = sum(x.size for x in jax.tree.leaves(make_step(c).abstract_params))
  np.testing.assert_allclose(m["opt/eps_norm"], 0.3, rtol=1e-5)
  np.testing.assert_allclose(m["opt/eps_rms"], 0.3 / count**0.5, rtol=1e-5)
  shares = [v for name, v in m.items() if name.startswith("eps_share/")]
  np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-5)


def test_how_much_of_eps_survives_a_bf16_second_pass(tiny_config):
  c = tiny_config
  c.opt.update(method="precond_func_sam", perturbed_dtype="bfloat16")
  train_step = make_step(c)
  params = jax.tree.map(np.asarray, train_step.init(0).params)

  def cosine(rho):
    c.opt.rho = rho
    return float(steps(c, 1)[1][0]["opt/eps_cosine"])

  size = sum(x.size for x in jax.tree.leaves(params)) ** 0.5
  assert cosine(1e-1 * size) > 0.99
  assert 0.05 < cosine(1e-5 * size) < 0.9  # most weights do not move, some jump
  c.opt.perturbed_dtype = "float32"
  assert "opt/eps_cosine" not in steps(c, 1)[1][0]


def test_saved_and_evaluated_parameters_are_the_unperturbed_ones(tiny_config):
  """With no step to take, a step leaves the parameters where they were, however large eps is."""
  c = tiny_config
  c.opt.update(method="precond_func_sam", rho=5.0, weight_decay=0.0)
  c.opt.update(peak_learning_rate=0.0, init_learning_rate=0.0, final_learning_rate=0.0)
  start = jax.device_get(make_step(c).init(0).params)
  state, history = steps(c, 2)
  assert history[0]["opt/eps_norm"] > 4.9
  jax.tree.map(np.testing.assert_array_equal, state.params, start)


@pytest.mark.parametrize(
  "method, base_name, words",
  [
    ("precond_sam", "sgd", "second moment"),
    ("precond_func_sam", "lion", "second moment"),
    ("momentum_sam", "muon", "first moment"),
  ],
)
def test_a_base_that_cannot_carry_the_method(tiny_config, method, base_name, words):
  tiny_config.opt.update(method=method, base=base_name)
  with pytest.raises(UsageError, match=words):
    validate(tiny_config)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(rho=-0.1), "opt.rho"),
    (dict(phi=2.0), "opt.phi"),
    (dict(method="precon_func_sam"), "precond_func_sam"),
    (dict(rho_schedule="piecewise", rho_pieces="0.8"), "fraction:factor"),
    (dict(perturb_group=3), "perturb_group"),
    (dict(method="momentum_precond_func_sam", precond_variant="paper"), "has one form"),
  ],
)
def test_bad_method_settings(tiny_config, changes, words):
  tiny_config.opt.update(changes)
  with pytest.raises(UsageError, match=words):
    validate(tiny_config)


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


@pytest.mark.parametrize("method", ["adamw", "sam", "precond_func_sam"])
def test_no_buffer_of_all_logits_in_the_compiled_step(tiny_config, method):
  c = tiny_config
  c.opt.method, c.head.residual, vocabulary = method, "recompute", 1009
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])

  def largest(chunk):
    c.head.chunk = chunk
    text = TrainStep(c, vocabulary, mesh).trace().lower().compile().as_text()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return max(math.prod(map(int, s.split(","))) for s in shapes)

  all_logits = c.batch_size * c.model.L * vocabulary
  assert largest(0) >= all_logits  # the check sees one where there is one
  assert largest(4) < all_logits


def bad_params(value):
  def change(state):
    params = jax.tree.map(lambda x: x, state.params)
    params["out_norm"]["scale"] = params["out_norm"]["scale"].at[0].set(value)
    return state.replace(params=params)

  return change


def bad_data(value):
  def change(i, batch):
    if i != 1:
      return batch
    return batch._replace(weights_BxL=batch.weights_BxL.at[3, 0].set(value))

  return change


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


def test_schedules_go_by_the_updates_that_were_made(tiny_config):
  c = tiny_config
  c.guard.policy = "skip"
  c.opt.update(warmup_steps=4, method="sam", rho=0.5, rho_schedule="lr")
  _, history = steps(c, 3, change=bad_data(np.nan))
  _, good = steps(c, 2)
  for key in ("opt/lr", "opt/rho"):  # the second step was rejected: the third is its repetition
    assert [h[key] for h in history] == [good[0][key], good[1][key], good[1][key]]


@pytest.mark.parametrize("key", ["opt.perturb_params", "opt.weight_decay_params"])
def test_a_pattern_that_matches_no_parameter_is_refused(tiny_config, key):
  tiny_config.opt[key.removeprefix("opt.")] = "kernal"
  with pytest.raises(UsageError, match=f"{key}=kernal matches no parameter; .*out_norm/scale"):
    make_step(tiny_config)


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
