"""The library call: what it promises for any model, against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import close

import nanosam
from nanosam.optim import base

X_BxI = jax.random.normal(jax.random.key(0), (8, 3))
Y_B = jnp.arange(8) % 4
BATCH = {"x": X_BxI, "y": Y_B}


def params_of(key, dtype=jnp.float32):
  one, two = jax.random.split(key)
  return {
    "in": {"kernel": jax.random.normal(one, (3, 5), dtype), "bias": jnp.zeros((1, 5), dtype)},
    "out": jax.random.normal(two, (5, 4), dtype),
  }


PARAMS = params_of(jax.random.key(1))


def outputs(p, batch):
  return jnp.tanh(batch["x"] @ p["in"]["kernel"] + p["in"]["bias"]) @ p["out"]


def loss(z_BxK, batch):
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z_BxK, batch["y"]))


def objective(p, batch=BATCH):
  return loss(outputs(p, batch), batch)


def trained_state(tx, params=PARAMS):
  """An optimizer state after a few updates."""
  state = tx.init(params)
  for _ in range(3):
    _, state = tx.update(jax.grad(objective)(params), state, params)
  return state


def eps_of(direction, rho):
  return jax.tree.map(lambda d: rho * d / optax.tree.norm(direction), direction)


@pytest.mark.parametrize("name", nanosam.METHODS)
def test_every_method_runs_under_jit_and_at_rho_zero_is_the_plain_gradient(name):
  state = trained_state(optax.adam(1e-2))
  expected = jax.value_and_grad(objective)(PARAMS)
  for rho, tolerance in ((0.0, 1e-6), (1e-6, 1e-2)):
    grad = nanosam.value_and_grad(outputs, loss, method=name, rho=rho, data_share=1.0)
    (value, metrics), g = jax.jit(grad)(PARAMS, BATCH, state)
    close((value, g), expected, rtol=tolerance, atol=tolerance)
  assert metrics["guard/nonfinite"] == metrics["guard/perturbed_nonfinite"] == 0


def test_sam_and_functional_sam_by_hand():
  g = jax.grad(objective)(PARAMS)
  there = jax.tree.map(jnp.add, PARAMS, eps_of(g, 0.3))
  _, sam = nanosam.value_and_grad(outputs, loss, method="sam", rho=0.3)(PARAMS, BATCH)
  close(sam, jax.grad(objective)(there), rtol=1e-5, atol=1e-7)
  residual = jax.grad(loss)(outputs(PARAMS, BATCH), BATCH)
  (func,) = jax.vjp(lambda p: outputs(p, BATCH), there)[1](residual)
  _, found = nanosam.value_and_grad(outputs, loss, method="func_sam", rho=0.3)(PARAMS, BATCH)
  close(found, func, rtol=1e-5, atol=1e-7)


def test_moments_are_found_in_chains_and_under_masks():
  inner = {"in": {"kernel": True, "bias": True}, "out": False}
  outer = jax.tree.map(lambda x: not x, inner)
  adam = optax.scale_by_adam()
  chained = optax.chain(optax.clip_by_global_norm(9.0), optax.adamw(1e-2))
  split = optax.chain(optax.masked(adam, inner), optax.masked(adam, outer), optax.scale(-1e-2))
  plain, *others = (base.moments(trained_state(tx)) for tx in (adam, chained, split))
  for found in others:
    close((found.mu, found.nu, found.steps), (plain.mu, plain.nu, plain.steps))
  grad = nanosam.value_and_grad(outputs, loss, method="precond_func_sam", rho=0.2)
  states = [trained_state(tx) for tx in (adam, chained, split)]
  first, *rest = (jax.jit(grad)(PARAMS, BATCH, state)[1] for state in states)
  for g in rest:
    close(g, first, rtol=1e-6)


def test_momentum_of_sgd_and_lion():
  for tx in (optax.sgd(1e-2, momentum=0.9), optax.lion(1e-2)):
    state = trained_state(tx)
    m = base.moments(state).mu
    there = jax.tree.map(jnp.add, PARAMS, eps_of(m, 0.1))
    grad = nanosam.value_and_grad(outputs, loss, method="momentum_sam", rho=0.1)
    (value, _), g = grad(PARAMS, BATCH, state)
    close((value, g), jax.value_and_grad(objective)(there), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sam", "func_sam", "precond_func_sam"])
def test_microbatches_of_unequal_weight_are_the_whole_batch(name):
  batch = {**BATCH, "w": jnp.array([1, 1, 0, 1, 0.5, 0, 0, 1])}

  def weighted(z_BxK, batch):
    nll_B = optax.softmax_cross_entropy_with_integer_labels(z_BxK, batch["y"])
    return jnp.sum(nll_B * batch["w"]) / jnp.sum(batch["w"])

  call = functools.partial(
    nanosam.value_and_grad, outputs, weighted, method=name, weight=lambda b: jnp.sum(b["w"])
  )
  state = trained_state(optax.adam(1e-2))
  (one, _), whole = call()(PARAMS, batch, state)
  (four, _), parts = call(microbatches=4)(PARAMS, batch, state)
  close((one, whole), (four, parts), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sam", "func_sam", "logit_sam"])
def test_a_batch_without_an_axis_of_examples(name):
  """Such as moments of a whole data set: numbers and matrices that are no list of anything."""
  moments = {"yy": jnp.float32(2.0), "yx": jnp.array([0.5, 1.0]), "xx": jnp.eye(2)}
  quadratic = lambda w, m: m["yy"] - 2 * w @ m["yx"] + w @ m["xx"] @ w  # noqa: E731
  w = jnp.array([1.0, 3.0])
  plain = jax.grad(quadratic)(w, moments)
  grad = nanosam.value_and_grad(lambda w, m: w, quadratic, method=name, rho=0.1)
  (value, _), g = jax.jit(grad)(w, moments)
  there = plain if name == "func_sam" else jax.grad(quadratic)(w + eps_of(plain, 0.1), moments)
  close((value, g), (quadratic(w, moments), there), rtol=1e-6)


def test_aux_values_are_averaged_over_microbatches_and_come_back():
  def with_accuracy(z_BxK, batch):
    return loss(z_BxK, batch), {"accuracy": jnp.mean(jnp.argmax(z_BxK, -1) == batch["y"])}

  expected = jnp.mean(jnp.argmax(outputs(PARAMS, BATCH), -1) == Y_B)
  for name in ("adamw", "sam", "func_sam", "momentum_func_sam"):
    call = functools.partial(nanosam.value_and_grad, outputs, with_accuracy, method=name)
    state = trained_state(optax.adam(1e-2))
    for microbatches in (1, 2):
      grad = call(has_aux=True, rho=1e-6, microbatches=microbatches)
      (value, metrics), g = jax.jit(grad)(PARAMS, BATCH, state)
      close((value, metrics["aux"]["accuracy"]), (objective(PARAMS), expected), rtol=1e-5)
      _, plain = nanosam.value_and_grad(outputs, loss, method=name, rho=1e-6)(PARAMS, BATCH, state)
      close(g, plain, rtol=1e-4, atol=1e-6)


def test_rho_as_a_schedule_of_adams_count_or_of_a_given_step():
  schedule = optax.linear_schedule(0.0, 1.0, 10)
  state = trained_state(optax.adam(1e-2))
  grad = jax.jit(nanosam.value_and_grad(outputs, loss, method="precond_sam", rho=schedule))
  (_, metrics), _ = grad(PARAMS, BATCH, state)
  np.testing.assert_allclose(metrics["opt/rho"], 0.3, rtol=1e-6)
  np.testing.assert_allclose(metrics["opt/eps_norm"], 0.3, rtol=1e-4)
  (_, metrics), g = grad(PARAMS, BATCH, state, 0)
  assert metrics["opt/eps_norm"] == 0
  close(g, jax.grad(objective)(PARAMS), rtol=1e-5)
  with pytest.raises(nanosam.MethodError, match="pass step="):
    nanosam.value_and_grad(outputs, loss, rho=schedule)(PARAMS, BATCH)


def test_perturb_leaves_parameters_out_of_eps_and_of_its_length():
  mask = {"in": {"kernel": True, "bias": False}, "out": False}
  for perturb in (mask, lambda params: mask):
    grad = nanosam.value_and_grad(outputs, loss, method="sam", rho=0.3, perturb=perturb)
    (_, metrics), g = grad(PARAMS, BATCH)
    direction = jax.tree.map(jnp.zeros_like, PARAMS)
    direction["in"]["kernel"] = jax.grad(objective)(PARAMS)["in"]["kernel"]
    there = jax.tree.map(jnp.add, PARAMS, eps_of(direction, 0.3))
    close(g, jax.grad(objective)(there), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["opt/eps_norm"], 0.3, rtol=1e-6)


def test_vmap_over_seeds():
  keys = jax.random.split(jax.random.key(3), 4)
  params = jax.vmap(params_of)(keys)
  tx = optax.adam(1e-2)
  states = jax.vmap(tx.init)(params)
  grad = nanosam.value_and_grad(outputs, loss, method="precond_func_sam", rho=0.1)
  _, together = jax.jit(jax.vmap(grad, in_axes=(0, None, 0)))(params, BATCH, states)
  for i in range(4):
    one, state = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (params, states))
    alone = grad(one, BATCH, state)[1]
    close(jax.tree.map(lambda x, i=i: x[i], together), alone, rtol=1e-4, atol=1e-6)


def test_sharded_parameters_and_batch():
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
  columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
  params = jax.device_put(PARAMS, {"in": {"kernel": whole, "bias": whole}, "out": columns})
  batch = jax.device_put(BATCH, rows)
  state = trained_state(optax.adam(1e-2))
  grad = jax.jit(nanosam.value_and_grad(outputs, loss, method="precond_func_sam", rho=0.1))
  close(grad(params, batch, state)[1], grad(PARAMS, BATCH, state)[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fall_back", [False, True])
def test_the_guards_verdict(fall_back):
  def fragile(z_BxK, batch):  # finite at theta alone
    return loss(z_BxK, batch) * jnp.where(jnp.all(z_BxK == outputs(PARAMS, BATCH)), 1, jnp.nan)

  grad = nanosam.value_and_grad(outputs, fragile, method="sam", rho=0.1, fall_back=fall_back)
  (_, metrics), g = grad(PARAMS, BATCH)
  assert metrics["guard/perturbed_nonfinite"] == 1 and metrics["guard/nonfinite"] == 0
  assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(g)) == fall_back
  (_, metrics), _ = grad(jax.tree.map(lambda x: x * jnp.nan, PARAMS), BATCH)
  assert metrics["guard/nonfinite"] == 1


@pytest.mark.parametrize(
  "change, said",
  [
    (dict(method="precon_sam"), "unknown method 'precon_sam'"),
    (dict(beta2=0.9), "unknown setting 'beta2'"),
    (dict(outputs=lambda p, b: jnp.argmax(outputs(p, b), -1)), "int32; return what the loss"),
    (dict(loss=lambda z, b: jnp.sum(z, -1)), r"a scalar, not shape \(8,\)"),
    (dict(has_aux=True), r"must return \(loss, aux\)"),
    (dict(method="precond_sam"), "second moment .*optax.adam"),
    (dict(method="momentum_sam"), "first moment .* sgd with momentum"),
  ],
)
def test_mistakes_are_named(change, said):
  settings = dict(outputs=outputs, loss=loss) | change
  with pytest.raises(nanosam.MethodError, match=said):
    nanosam.value_and_grad(**settings)(PARAMS, BATCH)


def test_moments_that_do_not_fit_are_named():
  masked = optax.masked(optax.adam(1e-2), {"in": {"kernel": True, "bias": True}, "out": False})
  grad = functools.partial(nanosam.value_and_grad, outputs, loss, method="precond_sam")
  with pytest.raises(nanosam.MethodError, match=r"none for \['out'\]: leave it out"):
    grad()(PARAMS, BATCH, trained_state(masked))
  mask = {"in": {"kernel": True, "bias": True}, "out": False}
  grad(perturb=mask)(PARAMS, BATCH, trained_state(masked))
  with pytest.raises(nanosam.MethodError, match="other parameters"):
    grad()(PARAMS, BATCH, optax.adam(1e-2).init({"w": jnp.ones(2)}))


def test_products_and_tau_of_any_model(x64):
  params = jax.tree.map(lambda x: x.astype(jnp.float64), PARAMS)
  v = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
  H, HG, HF = (
    nanosam.hessian_vector_product(outputs, loss, params, BATCH, v, part)
    for part in ("H", "HG", "HF")
  )
  expected = jax.jvp(jax.grad(objective), (params,), (v,))[1]
  close(H, expected, rtol=1e-9, atol=1e-12)
  close(jax.tree.map(jnp.add, HG, HF), expected, rtol=1e-9, atol=1e-12)
  z, Jv = jax.jvp(lambda p: outputs(p, BATCH), (params,), (v,))
  HJv = jax.jvp(lambda z: jax.grad(loss)(z, BATCH), (z,), (Jv,))[1]
  (by_loss,) = jax.vjp(lambda p: outputs(p, BATCH), params)[1](HJv)
  close(HG, by_loss, rtol=1e-9, atol=1e-12)
  found = nanosam.tau(outputs, loss, params, BATCH)
  np.testing.assert_allclose(sum(found), 1, rtol=1e-9)


def test_what_a_method_remembers_goes_out_and_in():
  params, tx = PARAMS, optax.sgd(0.1)
  grad = jax.jit(nanosam.value_and_grad(outputs, loss, method="stale_sam", rho=0.1))
  memory, before = None, None
  for _ in range(2):
    (_, metrics), g = grad(params, BATCH, memory=memory)
    if before is None:
      expected = jax.grad(objective)(params)  # the first step has nothing to go by
    else:
      scale = 0.1 / optax.tree.norm(before)
      there = jax.tree.map(lambda p, d, scale=scale: p + scale * d, params, before)
      expected = jax.grad(objective)(there)
    close(g, expected, rtol=1e-4, atol=1e-6)
    memory, before = metrics["memory"], g
    params = optax.apply_updates(params, tx.update(g, tx.init(params))[0])
  bad = {**BATCH, "x": BATCH["x"] * jnp.nan}
  (_, metrics), _ = grad(params, bad, memory=memory)
  close(metrics["memory"], memory)
  with pytest.raises(nanosam.MethodError, match="pass step="):
    nanosam.value_and_grad(outputs, loss, method="look_sam")(params, BATCH)
