"""The family against exact statements: closed forms, limits, identities."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.toy import (
  B,
  D,
  V,
  close,
  grad,
  loss_fn,
  make_method,
  run,
  scaled,
  setting,
  settings,
  toy,
)

from nanosam.data.batch import Batch
from nanosam.optim import base, methods
from nanosam.optim.direction import Moments, denominator, perturbation
from nanosam.optim.gradient import Recipe, estimate
from nanosam.optim.passes import Passes
from nanosam.run import flops

# Rows that differ only in when they have a second pass are in test_cheap.py.
METHODS = [name for name, row in methods.METHODS.items() if not callable(row.when)]
PERTURBING = [name for name in METHODS if name != "adamw"]


def add(a, b, factor=1.0):
  return jax.tree.map(lambda x, y: x + factor * y, a, b)


def test_plain_gradient_is_autodiff(x64):
  params, batch, moments = setting()
  loss, expected = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
  out = run("adamw", params, batch, moments, 0.1)
  close(out.gradient, expected)
  close(out.metrics["train/loss"], loss)


def test_sam_is_the_gradient_at_the_perturbed_point(x64):
  params, batch, moments = setting()
  there = add(params, scaled(grad(params, batch), 0.3))
  out = run("sam", params, batch, moments, 0.3)
  close(out.gradient, grad(there, batch))
  close(out.metrics["train/loss_perturbed"], loss_fn(there, batch))
  close(out.metrics["opt/eps_norm"], 0.3)


def dense(batch):
  """Parameters to all logits, and logits to the loss: what the chunked head never builds."""
  weights = batch.weights_BxL / jnp.sum(batch.weights_BxL)

  @jax.jit
  def network(p):
    return jnp.einsum("bld,vd->blv", toy().hidden(p, batch), p["embed"])

  def loss(z):
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(z, batch.targets_BxL))

  return network, loss


def test_func_and_logit_sam_against_a_dense_network(x64):
  """The paper's listing with its mistakes mended: one vjp at each point, the residual swapped."""
  params, batch, moments = setting()
  network, loss = dense(batch)
  z, back = jax.vjp(network, params)
  r = jax.grad(loss)(z)
  z2, back2 = jax.vjp(network, add(params, scaled(back(r)[0], 0.3)))
  close(run("func_sam", params, batch, moments, 0.3).gradient, back2(r)[0])
  close(run("logit_sam", params, batch, moments, 0.3).gradient, back(jax.grad(loss)(z2))[0])


@pytest.mark.parametrize("name", PERTURBING)
def test_no_radius_gives_the_plain_gradient(x64, name):
  params, batch, moments = setting()
  plain = run("adamw", params, batch, moments, 0.0).gradient
  for rho in (0.0, jnp.asarray(0.0)):
    close(run(name, params, batch, moments, rho).gradient, plain, rtol=0, atol=0)


def test_a_scheduled_zero_skips_the_second_pass(x64):
  """At run time: the conditional holds all work of theta', and its other branch has no matmul."""
  params, batch, moments = setting()
  method, model = make_method("func_sam"), toy()
  jaxpr = jax.make_jaxpr(
    lambda rho: estimate(method, Passes(model, params, batch), moments, rho).gradient
  )(0.1)
  (cond,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
  texts = [str(branch) for branch in cond.params["branches"]]
  assert sorted("dot_general" in t for t in texts) == [False, True]


@pytest.mark.parametrize("name, part", [("sam", "H"), ("func_sam", "F"), ("logit_sam", "G")])
def test_first_order_in_rho_is_a_hessian_product(x64, name, part):
  params, batch, moments = setting()
  g = grad(params, batch)
  d = scaled(g, 1.0)
  network, loss = dense(batch)
  z, dz = jax.jvp(network, (params,), (d,))
  _, back = jax.vjp(network, params)
  r, dr = jax.jvp(jax.grad(loss), (z,), (dz,))
  Gd = back(dr)[0]
  Fd = jax.jvp(lambda p: jax.vjp(network, p)[1](r)[0], (params,), (d,))[1]
  expected = {"G": Gd, "F": Fd, "H": add(Gd, Fd)}[part]

  def error(rho):
    out = run(name, params, batch, moments, rho).gradient
    return optax.tree.norm(add(jax.tree.map(lambda x, y: (x - y) / rho, out, g), expected, -1.0))

  errors = [float(error(rho)) for rho in (1e-2, 1e-3)]
  assert errors[0] < 0.5 * float(optax.tree.norm(expected))
  assert errors[0] / errors[1] == pytest.approx(10, rel=0.3)


def test_penalty_sam_is_autodiff_of_its_objective(x64):
  params, batch, moments = setting()

  def objective(p):
    return loss_fn(p, batch) + 0.3 * optax.tree.norm(jax.grad(loss_fn)(p, batch))

  expected = jax.jit(jax.grad(objective))(params)
  close(run("penalty_sam", params, batch, moments, 0.3).gradient, expected, rtol=1e-7)


def features(batch):
  return jax.nn.one_hot(batch.inputs, V, dtype=jnp.float64)


def test_linear_model_has_no_functional_path(x64):
  W = jax.random.normal(jax.random.key(0), (V, V))
  params, batch = {"embed": W}, setting()[1]
  model = toy(hidden=lambda p, b: features(b), hidden_perturbed=lambda p, b: features(b))
  go = lambda name, rho: run(name, params, batch, Moments(), rho, model=model).gradient  # noqa: E731
  plain = go("adamw", 0.0)
  close(go("func_sam", 10.0), plain, rtol=0, atol=0)
  close(go("sam", 10.0), go("logit_sam", 10.0), rtol=1e-12)
  assert float(optax.tree.norm(add(go("sam", 10.0), plain, -1.0))) > 1e-3


def test_two_linear_layers_in_closed_form(x64):
  """F = W2 W1 x: the functional gradient is affine in rho."""
  keys = jax.random.split(jax.random.key(0), 2)
  rho = 10.0
  params = {"W1": jax.random.normal(keys[0], (V, D)), "embed": jax.random.normal(keys[1], (V, D))}
  batch = setting()[1]
  linear = lambda p, b: features(b) @ p["W1"]  # noqa: E731
  model = toy(hidden=linear, hidden_perturbed=linear)
  out = run("func_sam", params, batch, Moments(), rho, model=model).gradient
  g = grad(params, batch, model)
  eps = scaled(g, rho)
  x, W2 = features(batch), params["embed"]
  z = x @ params["W1"] @ W2.T
  weights = (batch.weights_BxL / jnp.sum(batch.weights_BxL))[..., None]
  r = weights * (jax.nn.softmax(z) - jax.nn.one_hot(batch.targets_BxL, V, dtype=z.dtype))
  xr = jnp.einsum("blx,blv->xv", x, r)
  expected = {
    "W1": xr @ (W2 + eps["embed"]),
    "embed": xr.T @ (params["W1"] + eps["W1"]),
  }
  close(out, expected, rtol=1e-10)


def test_angles(x64):
  params, batch, moments = setting()
  go = lambda name, rho, **kw: run(name, params, batch, moments, rho, **kw).gradient  # noqa: E731
  close(go("angle_sam", 0.3, phi=0.0), go("func_sam", 0.3), atol=1e-14)
  close(go("angle_sam", 0.3, phi=math.pi / 2), go("logit_sam", 0.3), atol=1e-14)

  def distance(rho, a, b):
    return float(optax.tree.norm(add(a(rho), b(rho), -1.0)))

  pairs = {
    "sam at rho/sqrt 2": (
      lambda rho: go("angle_sam", rho),
      lambda rho: go("sam", rho / math.sqrt(2)),
    ),
    "exact and short": (
      lambda rho: go("angle_sam", rho, phi=1.0),
      lambda rho: go("angle_sam", rho, phi=1.0, angle_form="short"),
    ),
  }
  for a, b in pairs.values():
    slope = math.log10(distance(1e-1, a, b) / distance(1e-2, a, b))
    assert slope == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(
  "name, tied", [*((name, True) for name in METHODS), ("sam", False), ("func_sam", False)]
)
def test_chunks_stored_residuals_and_microbatches_change_nothing(x64, name, tied):
  params, batch, moments = setting(tied)

  def go(micro=1, **model):
    return run(name, params, batch, moments, 0.3, model=toy(**model), micro=micro).gradient

  expected = go(chunk=0)
  for kwargs in (dict(chunk=1, micro=2), dict(chunk=5, residual="store", micro=4)):
    close(go(**kwargs), expected, rtol=1e-8, atol=1e-11)


def test_one_group_is_the_whole_batch_and_many_are_not(x64):
  params, batch, moments = setting()
  go = lambda group: run("precond_func_sam", params, batch, moments, 0.5, group=group).gradient  # noqa: E731
  whole = run("precond_func_sam", params, batch, moments, 0.5).gradient
  close(go(B), whole)
  parts = [
    run(
      "precond_func_sam", params, Batch(*(x if x is None else x[i::2] for x in batch)), moments, 0.5
    )
    for i in range(2)
  ]
  shares = [float(batch.weights_BxL[i::2].sum() / batch.weights_BxL.sum()) for i in range(2)]
  first, second = (part.gradient for part in parts)
  close(go(2), add(jax.tree.map(lambda x: shares[0] * x, first), second, shares[1]))
  assert float(optax.tree.norm(add(go(2), whole, -1.0))) > 1e-6


def test_lengths_of_the_perturbation(x64):
  params, batch, moments = setting()
  g = run("adamw", params, batch, moments, 0.0).gradient

  def eps_and_M(variant):
    method = make_method("precond_sam", precond_variant=variant)
    ray = method.direction.ray(g, params, moments, method.opt)
    look = None if variant == "paper" else g
    return perturbation(ray, 0.7)[0], denominator(moments, method.opt, look)

  for variant, unit in (("post", None), ("paper", g)):
    eps, M = eps_and_M(variant)
    vector = jax.tree.map(jnp.divide, g, M)
    length = optax.tree.norm(vector if unit is None else unit)
    close(eps, jax.tree.map(lambda v, length=length: 0.7 * v / length, vector))
  np.testing.assert_allclose(optax.tree.norm(eps_and_M("post")[0]), 0.7, rtol=1e-12)


def test_a_constant_preconditioner_is_sam(x64):
  params, batch, moments = setting()
  c = 3.0
  flat_nu = jax.tree.map(lambda x: jnp.full_like(x, c**2 * (1 - 0.98**7)), params)
  moments = moments._replace(nu=flat_nu)
  go = lambda name, rho, **kw: run(name, params, batch, moments, rho, eps=0.0, **kw).gradient  # noqa: E731
  close(go("precond_sam", 0.4, precond_power=0.0), go("sam", 0.4))
  close(go("precond_sam", 0.4, precond_variant="paper"), go("sam", 0.4 / c))


def test_first_step_of_the_preconditioned_direction(x64):
  params, batch, _ = setting(False)
  zeros = optax.tree.zeros_like(params)
  fresh = Moments(zeros, zeros, 0)
  g = run("adamw", params, batch, fresh, 0.0).gradient
  method = make_method("precond_sam", eps=0.0)
  eps, _ = perturbation(method.direction.ray(g, params, fresh, method.opt), 0.7)
  nnz = sum(int((x != 0).sum()) for x in jax.tree.leaves(g))
  assert nnz < sum(x.size for x in jax.tree.leaves(g))  # unseen rows of the embedding
  close(eps, jax.tree.map(lambda x: 0.7 * jnp.sign(x) / math.sqrt(nnz), g), rtol=1e-6)
  paper = run("precond_sam", params, batch, fresh, 0.4, precond_variant="paper").gradient
  close(paper, run("sam", params, batch, fresh, 0.4).gradient)


def test_asam_scales_by_the_weights(x64):
  params, batch, moments = setting()
  g = grad(params, batch)
  T = jax.tree.map(lambda w: jnp.abs(w) + 0.01, params)
  T["scale"] = jnp.ones_like(params["scale"])  # a norm's
  Tg = jax.tree.map(jnp.multiply, T, g)
  eps = jax.tree.map(lambda t, x: 0.3 * t * x / optax.tree.norm(Tg), T, Tg)
  out = run("asam", params, batch, moments, 0.3).gradient
  close(out, grad(add(params, eps), batch))


def test_momentum_methods(x64):
  params, batch, moments = setting()
  eps = scaled(moments.mu, 0.3)
  out = run("momentum_sam", params, batch, moments, 0.3)
  close(out.gradient, grad(add(params, eps), batch))
  assert "train/loss" not in out.metrics  # never computed, so not claimed
  descent = run("momentum_sam", params, batch, moments, 0.3, momentum_sign=-1.0).gradient
  close(descent, grad(add(params, eps, -1.0), batch))
  fresh = moments._replace(mu=optax.tree.zeros_like(params))
  plain = run("adamw", params, batch, fresh, 0.0)
  for name in ("momentum_sam", "momentum_func_sam", "momentum_precond_func_sam"):
    out = run(name, params, batch, fresh, 0.3)
    close(out.gradient, plain.gradient)
    assert out.metrics["guard/no_perturbation"] == 1
  out = run("momentum_func_sam", params, batch, moments, 0.3)
  close(out.metrics["train/loss"], plain.metrics["train/loss"])


def test_momentum_runs_no_backward_at_theta(x64):
  params, batch, moments = setting()

  def cost(name):
    method = make_method(name)
    f = lambda p: estimate(method, Passes(toy(), p, batch), moments, 0.1).gradient  # noqa: E731
    return flops.count(jax.make_jaxpr(f)(params))

  adamw, momentum_sam = cost("adamw"), cost("momentum_sam")
  assert momentum_sam == adamw
  assert cost("sam") == 2 * adamw
  assert adamw < cost("momentum_func_sam") < 1.4 * adamw


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan, 0.0])
def test_an_unusable_direction_gives_the_plain_gradient(x64, bad):
  params, batch, moments = setting()
  broken = moments._replace(mu=jax.tree.map(lambda x: x * 0 + bad, moments.mu))
  plain = run("adamw", params, batch, moments, 0.0).gradient
  out = run("momentum_func_sam", params, batch, broken, 0.3)
  close(out.gradient, plain)
  assert out.metrics["guard/no_perturbation"] == 1


def test_masked_parameters_are_left_out_of_eps_and_of_its_norm(x64):
  params, batch, moments = setting()
  opt = settings("sam")
  covered = base.matching(params, "mlp")
  method = Recipe(
    *methods.resolve(opt),
    opt,
    lambda tree: jax.tree.map(lambda x, yes: x if yes else jnp.zeros_like(x), tree, covered),
  )
  g = grad(params, batch)
  g_mlp = method.only_perturbed(g)
  expected = grad(add(params, scaled(g_mlp, 0.3)), batch)
  close(estimate(method, Passes(toy(), params, batch), moments, 0.3).gradient, expected)


def test_sam_with_sgd_equals_optax(x64):
  """The outside oracle. (optax's own class cannot express the functional path.)"""
  params, batch, _ = setting()
  rho, lr = 0.3, 0.5
  sam = optax.contrib.sam(
    optax.sgd(lr), optax.chain(optax.contrib.normalize(), optax.sgd(rho)), sync_period=2,
    opaque_mode=True,
  )  # fmt: skip
  grad_fn = jax.grad(lambda p, _: loss_fn(p, batch))
  updates, _ = sam.update(grad_fn(params, 0), sam.init(params), params, grad_fn=grad_fn)
  ours = run("sam", params, batch, Moments(), rho).gradient
  close(updates, jax.tree.map(lambda g: -lr * g, ours), rtol=1e-6)
