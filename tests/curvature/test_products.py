"""Products and taus against dense matrices and closed forms; then a real model's."""

import functools
import json
import subprocess
import sys

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.batches import random_batch
from helpers.toy import V, hidden, loss_fn, make_method, scaled, setting, toy
from helpers.training import ROOT

from nanosam.curvature import ball, critical, density, pac_bayes, products
from nanosam.curvature.products import FUNCTIONAL, GAUSS_NEWTON, HESSIAN, Surface
from nanosam.curvature.spectrum import LARGEST, SMALLEST, Lanczos, converge, hutchinson
from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.transformer import unembedding
from nanosam.optim.direction import Moments
from nanosam.optim.gradient import estimate
from nanosam.optim.passes import Passes
from nanosam.run import flops
from nanosam.run.step import TrainStep

PATHS = {"H": HESSIAN, "HG": GAUSS_NEWTON, "HF": FUNCTIONAL}


def dense(params, batch, model=None):
  """H, H_G and H_F of the toy as matrices, by autodiff through all logits at once."""
  theta, unravel = jax.flatten_util.ravel_pytree(params)
  model = model or toy()

  def logits(theta):
    p = unravel(theta)
    return jnp.einsum("bld,vd->blv", model.hidden(p, batch), unembedding(p))

  def loss(S):
    nll_BxL = optax.softmax_cross_entropy_with_integer_labels(S, batch.targets_BxL)
    return jnp.sum(nll_BxL * batch.weights_BxL) / jnp.sum(batch.weights_BxL)

  H = jax.hessian(lambda t: loss(logits(t)))(theta)
  r = jax.grad(loss)(logits(theta))
  HF = jax.hessian(lambda t: jnp.vdot(logits(t), r))(theta)
  J = jax.jacobian(logits)(theta).reshape(r.size, -1)
  A = jax.hessian(lambda s: loss(s.reshape(r.shape)))(logits(theta).ravel())
  return {"H": H, "HG": J.T @ A @ J, "HF": HF}


@functools.partial(jax.jit, static_argnames="microbatches")
def every_product(params, batch, v, microbatches=1):
  passes = Passes(toy(), params, batch, microbatches)
  return {name: products.product(passes, path, v) for name, path in PATHS.items()}


def noise(params, seed=1):
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return tree.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def ravel(tree):
  return np.asarray(jax.flatten_util.ravel_pytree(tree)[0])


# The products.


def test_products_are_those_of_the_dense_matrices(x64):
  params, batch, _ = setting()
  matrices = jax.jit(dense)(params, batch)
  np.testing.assert_allclose(matrices["HG"] + matrices["HF"], matrices["H"], atol=1e-12)
  assert np.linalg.eigvalsh(matrices["HG"])[0] > -1e-12
  v = noise(params)
  for name, found in every_product(params, batch, v).items():
    np.testing.assert_allclose(ravel(found), matrices[name] @ ravel(v), rtol=1e-9, atol=1e-12)


def test_products_are_linear_and_symmetric(x64):
  params, batch, _ = setting()
  u, v = noise(params, 1), noise(params, 2)
  both = jax.tree.map(lambda a, b: 2 * a - 3 * b, u, v)
  Au, Av, A_both = (every_product(params, batch, x) for x in (u, v, both))
  for name in PATHS:
    expected = 2 * ravel(Au[name]) - 3 * ravel(Av[name])
    np.testing.assert_allclose(ravel(A_both[name]), expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(ravel(v) @ ravel(Au[name]), ravel(u) @ ravel(Av[name]), rtol=1e-10)


def test_microbatches_make_the_same_products_and_forms(x64):
  """The forms v^T A v, by forward passes alone, are those of the products."""
  params, batch, _ = setting()
  v = noise(params)
  one, two = (every_product(params, batch, v, microbatches=k) for k in (1, 2))
  for name in PATHS:
    np.testing.assert_allclose(ravel(two[name]), ravel(one[name]), rtol=1e-10, atol=1e-14)
  forms = jax.jit(lambda p, b, v: products.quadratic_forms(Passes(toy(), p, b, 2), v))
  for found, name in zip(forms(params, batch, v), ("HG", "HF"), strict=True):
    assert float(found) == pytest.approx(ravel(v) @ ravel(one[name]), rel=1e-9)


def test_methods_move_by_rho_times_the_product(x64):
  """(g_method - g) / rho -> A d, with an error linear in rho."""
  params, batch, moments = setting()
  names = {"H": "sam", "HF": "func_sam", "HG": "logit_sam"}

  @jax.jit
  def gradients(params, batch, rho):
    passes = Passes(toy(), params, batch)
    return {k: estimate(make_method(m), passes, moments, rho).gradient for k, m in names.items()}

  g = ravel(gradients(params, batch, 0.0)["H"])
  d = jax.flatten_util.ravel_pytree(params)[1](g / np.linalg.norm(g))
  expected = {name: ravel(x) for name, x in every_product(params, batch, d).items()}
  moved = {rho: gradients(params, batch, rho) for rho in (1e-3, 1e-4)}
  for name in names:
    large, small = (
      np.linalg.norm((ravel(moved[rho][name]) - g) / rho - expected[name]) for rho in moved
    )
    assert large < 0.01 * np.linalg.norm(expected[name])
    assert large / small == pytest.approx(10, rel=0.05)


def test_no_product_holds_all_logits():
  """Of B x L x V elements there is no value anywhere in the programs, however deep."""
  B, L, V = 4, 64, 50
  batch = random_batch(0, B, L, V)
  params = {"embed": jnp.ones((V, 3)), "mix": jnp.ones((3, 3))}

  def hidden(p, batch):
    return jnp.tanh(p["embed"][batch.inputs] @ p["mix"])

  model = toy(hidden=hidden, hidden_perturbed=hidden, chunk=8)
  passes = Passes(model, params, batch)
  programs = [lambda v, path=path: products.product(passes, path, v) for path in PATHS.values()]
  for program in [*programs, lambda v: products.quadratic_forms(passes, v)]:
    text = str(jax.make_jaxpr(program)(params))
    assert f"[{B},8,{V}]" in text  # one chunk
    compiled = jax.jit(program).lower(params).compile().as_text()
    assert f"[{B},8,{V}]" in compiled and f"[{B},{L},{V}]" not in compiled + text
    assert f"[{L // 8},{B},8,{V}]" not in compiled + text


def test_a_hessian_product_costs_what_it_should(tiny_config):
  """Of three products of matrices each has two tangents, and two are needed themselves: 8/3."""
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  train_step = TrainStep(tiny_config, V, mesh)
  passes = Passes(train_step.model, train_step.init(0).params, random_batch(0, 8, 12, V))
  gradient = flops.count(jax.make_jaxpr(lambda: passes.first()[1])())
  for path, most in ((HESSIAN, 2.75), (GAUSS_NEWTON, 2.35), (FUNCTIONAL, 3.4)):
    jaxpr = jax.make_jaxpr(lambda v, path=path: products.product(passes, path, v))(passes.params)
    assert flops.count(jaxpr) <= most * gradient, path


def test_a_probe_is_exact_on_a_diagonal_matrix(x64):
  d = jnp.arange(1.0, 9.0)
  for seed in range(3):
    z = products.rademacher(jax.random.key(seed), {"w": d})["w"]
    assert set(np.unique(z)) <= {-1.0, 1.0}
    assert float(z @ (d * z)) == float(d.sum())


# Taus.


@functools.partial(jax.jit, static_argnames="hidden")
def find_taus(params, batch, d, hidden=hidden):
  model = toy(hidden=hidden, hidden_perturbed=hidden)
  return products.taus(Passes(model, params, batch), d)


def test_taus_are_those_of_the_dense_matrices(x64):
  params, batch, _ = setting()
  matrices, d = jax.jit(dense)(params, batch), noise(params)
  G, F, H = (matrices[name] @ ravel(d) for name in ("HG", "HF", "H"))
  found = find_taus(params, batch, d)
  np.testing.assert_allclose(found, np.array([G @ G, F @ F, 2 * G @ F]) / (H @ H), rtol=1e-9)


def test_taus_sum_to_one_in_fp32_and_ignore_length_and_sign():
  params, batch, _ = setting()
  d = scaled(noise(params), 1.0)
  found = np.array(find_taus(params, batch, d))
  assert abs(found.sum() - 1) < 1e-5
  for factor in (-1.0, 1e-3, 30.0):
    other = find_taus(params, batch, jax.tree.map(lambda x, f=factor: f * x, d))
    np.testing.assert_allclose(other, found, rtol=1e-4)


def test_taus_ignore_the_scale_of_the_loss(x64):
  """Twice the batch with half the weight: the same; all weights times 3: the same."""
  params, batch, _ = setting()
  d = noise(params)
  scaled_batch = batch._replace(weights_BxL=3 * batch.weights_BxL)
  np.testing.assert_allclose(
    find_taus(params, scaled_batch, d), find_taus(params, batch, d), rtol=1e-9
  )


def test_a_model_linear_in_its_parameters_has_no_functional_path(x64):
  """Logits h W^T with h fixed: H_F = 0, tau = (1, 0, 0)."""
  _, batch, _ = setting()
  h = jax.random.normal(jax.random.key(3), (*batch.inputs.shape, 5))
  params = {"unembed": jax.random.normal(jax.random.key(4), (V, 5)), "embed": jnp.zeros((1, 1))}
  d = noise(params)
  found = find_taus(params, batch, d, hidden=lambda p, b: h)
  assert tuple(map(float, found)) == (1.0, 0.0, 0.0)


def test_two_linear_layers_have_the_functional_hessian_of_their_product(x64):
  """F = x W1 W2^T: <R, F> is bilinear, so H_F (V1, V2) = (x^T R V2, (x V1)^T R)^T, closed form."""
  _, batch, _ = setting()
  x = jax.random.normal(jax.random.key(5), (*batch.inputs.shape, 4))
  model = toy(hidden=lambda p, b: x @ p["W1"], hidden_perturbed=lambda p, b: x @ p["W1"])
  params = {
    "W1": jax.random.normal(jax.random.key(6), (4, 5)),
    "unembed": jax.random.normal(jax.random.key(7), (V, 5)),
    "embed": jnp.zeros((1, 1)),
  }
  v = noise(params)
  S = jnp.einsum("blx,xd,vd->blv", x, params["W1"], params["unembed"])
  weights = batch.weights_BxL / batch.weights_BxL.sum()
  R = weights[..., None] * (jax.nn.softmax(S) - jax.nn.one_hot(batch.targets_BxL, V))
  passes = Passes(model, params, batch)
  found = jax.jit(lambda v: products.product(passes, FUNCTIONAL, v))(v)
  expected = {
    "W1": jnp.einsum("blx,blv,vd->xd", x, R, v["unembed"]),
    "unembed": jnp.einsum("blv,blx,xd->vd", R, x, v["W1"]),
  }
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-13)


# A real model, on one device and on eight.


def place(tree, mesh):
  return jax.device_put(jax.device_get(tree), sharding.state_shardings(tree, mesh))


@pytest.fixture
def model(tiny_config):
  """Parameters of a tiny model, two batches, and a Surface over them on any mesh."""
  vocab = 96
  tiny_config.model.D = 12
  one = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  state = TrainStep(tiny_config, vocab, one).init(0)
  batches = [jax.tree.map(np.asarray, random_batch(i, 8, 12, vocab)) for i in range(2)]
  model = products.exact_model(tiny_config, vocab)

  def surface(mesh=one, microbatches=1):
    return Surface(model, batches, mesh, microbatches), place(state.params, mesh)

  surface.model, surface.batches, surface.opt = model, batches, tiny_config.opt
  surface.parameters = sum(x.size for x in jax.tree.leaves(state.params))
  return surface


def together(batches):
  return Batch(*(None if x[0] is None else np.concatenate(x) for x in zip(*batches, strict=True)))


@pytest.mark.full
def test_a_model_of_some_thousand_parameters_against_its_dense_hessian(model):
  """lambda_max, lambda_min and traces of the mean over two unequal batches."""
  surface, params = model()
  assert 2000 < model.parameters < 4000
  theta, unravel = jax.flatten_util.ravel_pytree(params)
  batch = together(model.batches)

  def gradient(theta):
    return jax.flatten_util.ravel_pytree(
      jax.grad(lambda p: loss_fn(p, batch, model.model))(unravel(theta))
    )[0]

  column = jax.jit(lambda e: jax.jvp(gradient, (theta,), (e,))[1])
  H = np.asarray(jax.lax.map(column, jnp.eye(theta.size), batch_size=64), float)
  exact = np.linalg.eigvalsh((H + H.T) / 2)

  found = Lanczos(
    lambda v: surface.product(HESSIAN, params, v),
    lambda: surface.signs(params, jax.random.key(0)),
  )
  assert converge(found, (LARGEST, SMALLEST), rtol=1e-3, most=300)
  assert found.eigenvalue(LARGEST).value == pytest.approx(exact[-1], rel=1e-4)
  assert found.eigenvalue(SMALLEST).value == pytest.approx(exact[0], rel=1e-3)

  means, _ = hutchinson(
    lambda key: surface.probe(params, key), jax.random.key(1), ["H", "HG"], rtol=0.02, most=400
  )
  assert abs(means["H"].value - np.trace(H)) < 3 * means["H"].sem
  assert means["H"].value == pytest.approx(means["HG"].value + means["HF"].value)


def measure(surface, params, opt):
  loss, g = surface.gradient(params)
  found = Lanczos(
    lambda v: surface.product(HESSIAN, params, v),
    lambda: surface.signs(params, jax.random.key(0)),
  )
  for _ in range(4):
    found.advance()
  taus = surface.taus(params, Moments(None, jax.tree.map(jnp.square, g), jnp.asarray(3)), opt)
  assert all(abs(sum(t) - 1) < 1e-5 for batch in taus for t in batch.values())
  probe = surface.probe(params, jax.random.key(1))  # a batch's signs depend on its number alone
  assert surface.loss(params, g, 0.0) == pytest.approx(loss, rel=1e-6)
  others = {
    "ball": ball.highest(surface.gradient, params, g, 0.1, 2),
    "critical": critical.sharpness(surface, params, g, g, tolerance=1e-4),
    "mean": density.moment(density.quadrature(found, 1), 1),
  }
  with surface.exactly():
    noise = jax.jit(pac_bayes.gaussian)(jax.random.key(2), params)
  vectors = [g, found.eigenvector(LARGEST), ball.moved(params, ball.unit(g), 0.1), noise]
  return [loss, found.eigenvalue(LARGEST), taus, probe, others], vectors


def test_one_device_and_eight_measure_the_same(model):
  """Also with microbatches; and vectors lie as the parameters do."""
  wanted = measure(*model(), model.opt)
  surface, params = model(sharding.make_mesh(2, 4), microbatches=2)
  numbers, vectors = found = measure(surface, params, model.opt)
  for x, expected in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    np.testing.assert_allclose(x, expected, rtol=5e-4, atol=5e-6)
  for x, p in zip(*map(jax.tree.leaves, (vectors, 4 * [params])), strict=True):
    assert x.sharding.is_equivalent_to(p.sharding, x.ndim)
  assert len(jax.tree.leaves(numbers)) == 1 + 2 + 2 * 2 * 3 + 3 + 3


def test_at_the_critical_step_a_networks_loss_is_what_it_was(model):
  """A little before it is lower, a little beyond it is higher."""
  surface, params = model()
  loss, g = surface.gradient(params)
  eta = 2 / critical.sharpness(surface, params, g, g)
  before, beyond = (surface.gradient(ball.moved(params, g, -f * eta))[0] for f in (0.97, 1.03))
  assert before < loss < beyond
  assert critical.sharpness(surface, params, g, jax.tree.map(jnp.negative, g)) is None


def test_errors_under_noise_are_the_same_on_any_mesh(model):
  one = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  found = []
  for mesh in (one, sharding.make_mesh(2, 4)):
    _, params = model(mesh)
    errors = pac_bayes.NoisyErrors(model.model, mesh)
    rows = lambda draw: model.batches[draw].rows(slice(6))  # noqa: E731
    found.append(errors(params, rows, (0.0, 0.3), 2, jax.random.key(0)))
  np.testing.assert_allclose(*found, atol=0.02)  # a tie may go either way
  assert found[0].shape == (2, 2)


@pytest.mark.full
def test_what_products_cost(commands):
  """The benchmark's rows: FLOPs and temporaries, compiled as for real use."""
  words = "--size=mini --batch_size=4 --length=64 --vocab_size=2048 --rounds=1 --json".split()
  run = subprocess.run(
    [sys.executable, ROOT / "scripts" / "benchmark.py", "curvature", *words],
    env=commands.environment(devices=1, fault=""),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert run.returncode == 0, run.stderr
  rows = {row["method"]: row for row in json.loads(run.stdout)}
  gradient, H, forms = rows["gradient"], rows["H v"], rows["v H_G v, v H_F v"]
  assert H["flops_ratio"] < 2.75 and H["time_ratio"] > 0
  assert H["temp_mib"] <= 2.2 * gradient["temp_mib"] + 4 * gradient["vector_mib"]
  assert forms["temp_mib"] < gradient["temp_mib"]  # nothing is kept for a way back
