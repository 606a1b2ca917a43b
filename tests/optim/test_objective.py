"""A plain pair of functions is an objective: every method makes of it what it makes of the chunked
language model."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.toy import close, hidden, make_method, run, setting, toy

from nanosam.curvature import products
from nanosam.model.transformer import unembedding
from nanosam.optim import methods
from nanosam.optim.direction import Moments
from nanosam.optim.objective import Dense
from nanosam.optim.passes import Passes


def logits(params, batch):
  return jnp.einsum("bld,vd->blv", hidden(params, batch), unembedding(params))


def loss(logits_BxLxV, batch):
  nll_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch.targets_BxL)
  return jnp.sum(nll_BxL * batch.weights_BxL) / jnp.sum(batch.weights_BxL)


DENSE = Dense(logits, loss, weight=lambda batch: jnp.sum(batch.weights_BxL))


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize(
  "how", [dict(micro=2), pytest.param(dict(), marks=pytest.mark.full)], ids=str
)
def test_dense_is_chunked(x64, name, how):
  compare_dense_and_chunked(name, how)


@pytest.mark.full
@pytest.mark.parametrize(
  "name", [name for name in methods.METHODS if not make_method(name).when.remembers]
)
def test_dense_is_chunked_by_group(x64, name):
  compare_dense_and_chunked(name, dict(group=2))


def compare_dense_and_chunked(name, how):
  params, batch, moments = setting()
  ours, plain = (
    run(name, params, batch, moments, 0.3, model=model, **how) for model in (None, DENSE)
  )
  close(ours.gradient, plain.gradient)
  close(ours.metrics, plain.metrics)


def test_examples_count_alike_unless_a_weight_says_otherwise(x64):
  params, batch, moments = setting()
  batch = batch._replace(weights_BxL=jnp.ones_like(batch.weights_BxL))
  for objective in (Dense(logits, loss), DENSE):
    whole, parts = (
      run("sam", params, batch, moments, 0.3, model=objective, micro=micro) for micro in (1, 2)
    )
    close(whole.gradient, parts.gradient)


def test_second_derivatives_of_a_pair_of_functions(x64):
  params, batch, moments = setting()
  chunked, plain = (
    jax.jit(lambda p, b, z, m=model: products.quadratic_forms(Passes(m, p, b, 2), z))(
      params, batch, moments.mu
    )
    for model in (toy(), DENSE)
  )
  close(chunked, plain)


@pytest.mark.parametrize(
  "params", [jnp.arange(3.0), [jnp.ones(2), (jnp.ones(3),)]], ids=["array", "list"]
)
def test_parameters_are_any_tree(params):
  x_Bx1 = jnp.arange(4.0)[:, None]
  flat = lambda p: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(p))  # noqa: E731
  objective = Dense(lambda p, x_Bx1: flat(p) * x_Bx1, lambda z_Bx1, x_Bx1: jnp.mean(z_Bx1**2))
  g = jax.grad(lambda p: jnp.mean((flat(p) * x_Bx1) ** 2))
  norm = optax.tree.norm(g(params))
  there = jax.tree.map(lambda p, d: p + 0.1 * d / norm, params, g(params))

  close(run("sam", params, x_Bx1, Moments(), 0.1, model=objective).gradient, g(there), rtol=1e-5)
