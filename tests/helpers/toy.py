"""A toy model of a few parameters, and any method on it."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.batches import random_batch
from nanosam.model.classifier import Classifier
from nanosam.optim import methods
from nanosam.optim.direction import Moments
from nanosam.optim.gradient import Recipe, estimate, estimate_by_group
from nanosam.optim.passes import Passes

B, L, D, F, V = 4, 6, 5, 7, 30


def settings(method, **changes):
  defaults = dict(
    method=method, base="adamw", b1=0.9, b2=0.98, eps=1e-9, phi=math.pi / 4, angle_form="exact",
    precond_variant="post", precond_power=1.0, asam_eta=0.01, momentum_sign=1.0,
    every=5, look_alpha=0.7, ascent_fraction=1.0, ae_start=1.0, ae_end=-1.0, ae_decay=0.9,
    num_train_steps=10, rho_scaling="global", rho_max=1.0, top_share=0.5, weight_share=1.0,
    data_share=1.0, perturbed_dtype="float32",
  )  # fmt: skip
  return SimpleNamespace(**defaults | changes)


def make_method(name, **changes):
  opt = settings(name, **changes)
  return Recipe(*methods.resolve(opt), opt, lambda tree: tree)


def hidden(p, batch):
  """Small, smooth, nonlinear in every parameter, with an embedding that the head uses too."""
  x_BxLxD = p["embed"][batch.inputs] * p["scale"]
  x_BxLxD += jnp.cumsum(jnp.tanh(x_BxLxD @ p["mlp"]["up"]) @ p["mlp"]["down"], axis=1)
  return x_BxLxD


def toy(**changes):
  defaults = dict(hidden=hidden, hidden_perturbed=hidden, chunk=4, residual="recompute")
  return Classifier(**defaults | changes)


@functools.partial(jax.jit, static_argnums=0)
def setting(tied=True):
  """Parameters, a padded batch, and moments as after some training."""
  shapes = {"embed": (V, D), "scale": (1, 1, D), "mlp": {"up": (D, F), "down": (F, D)}}
  if not tied:
    shapes["unembed"] = (V, D)
  noise = lambda: jax.tree.map(  # noqa: E731
    lambda s: jax.random.normal(next(keys), s), shapes, is_leaf=lambda s: isinstance(s, tuple)
  )
  keys = iter(jax.random.split(jax.random.key(0), 20))
  params = jax.tree.map(lambda x: 0.5 * x, noise())
  params["scale"] += 1
  moments = Moments(noise(), jax.tree.map(lambda x: 0.01 * x**2, noise()), 7, updates=0)
  return params, random_batch(0, B, L, V), moments


def run(name, params, batch, moments, rho, *, model=None, micro=1, group=0, memory=None, **changes):
  method = make_method(name, **changes)
  model = model or toy()
  memory = method.when.init(params) if memory is None else memory

  @jax.jit
  def go(params, batch, moments, memory):
    passes = Passes(model, params, batch, micro)
    if group:
      return estimate_by_group(method, passes, moments, rho, group)
    return estimate(method, passes, moments, rho, memory)

  return go(params, batch, moments, memory)


def loss_fn(params, batch, model=None):
  h_BxLxD = (model or toy()).hidden(params, batch)
  logits = jnp.einsum("bld,vd->blv", h_BxLxD, params.get("unembed", params["embed"]))
  nll_BxL = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets_BxL)
  return jnp.sum(nll_BxL * batch.weights_BxL) / jnp.sum(batch.weights_BxL)


grad = jax.jit(jax.grad(loss_fn), static_argnums=2)


def scaled(direction, rho):
  return jax.tree.map(lambda d: rho * d / optax.tree.norm(direction), direction)


def close(a, b, rtol=1e-9, atol=1e-12):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)
