"""Directions of the perturbation, and its length.

A direction gives a vector and what counts as its length; the perturbation is
eps = rho * vector / length: one global vector over the whole batch, the same on every topology.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanosam.optim.objective import Params


class Moments(NamedTuple):
  """What the base optimizer remembers of earlier gradients; None where it keeps no such thing."""

  mu: Params | None = None
  nu: Params | None = None
  steps: jax.Array | int = 0


class Ray(NamedTuple):
  vector: Params
  length: jax.Array


class Direction(NamedTuple):
  """`ray(g, params, moments, opt)`; g is None if no gradient is needed."""

  ray: Callable[[Any, Params, Moments, Any], Ray]
  needs_gradient: bool = True
  needs_mu: bool = False
  needs_nu: bool = False


VARIANTS = ("post", "paper")  # of opt.precond_variant


def _gradient(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  return Ray(g, optax.tree.norm(g))


def _preconditioned(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  """M^-1 g, by default with M as after this step and with rho as the length of eps.

  `paper` is its Eq. 12 to the letter: M as stored, and eps = rho M^-1 g / |g|, which for P
  parameters is about rho sqrt(P) / |g| long.
  """
  paper = opt.precond_variant == "paper"
  M = denominator(moments, opt, lookahead=None if paper else g)
  vector = jax.tree.map(_divide, g, M)
  return Ray(vector, optax.tree.norm(g if paper else vector))


def _adaptive(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  """ASAM: distances relative to each weight; biases and scales of norms stay as they are."""

  def relative(path: Any, w: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return jnp.ones_like(w) if name in ("bias", "scale") else jnp.abs(w) + opt.asam_eta

  scale = jax.tree_util.tree_map_with_path(relative, params)
  scaled = jax.tree.map(jnp.multiply, scale, g)
  return Ray(jax.tree.map(jnp.multiply, scale, scaled), optax.tree.norm(scaled))


def _momentum(g: None, params: Params, moments: Moments, opt: Any) -> Ray:
  m = jax.tree.map(lambda m: opt.momentum_sign * m, moments.mu)
  return Ray(m, optax.tree.norm(m))


def _preconditioned_momentum(g: None, params: Params, moments: Moments, opt: Any) -> Ray:
  m = _momentum(g, params, moments, opt).vector
  vector = jax.tree.map(_divide, m, denominator(moments, opt, lookahead=None))
  return Ray(vector, optax.tree.norm(vector))


gradient = Direction(_gradient)
preconditioned = Direction(_preconditioned, needs_nu=True)
adaptive = Direction(_adaptive)
momentum = Direction(_momentum, needs_gradient=False, needs_mu=True)
preconditioned_momentum = Direction(
  _preconditioned_momentum, needs_gradient=False, needs_mu=True, needs_nu=True
)


def denominator(moments: Moments, opt: Any, lookahead: Params | None) -> Params:
  """Adam's own M = (sqrt(nu_hat) + eps)^power.

  With a gradient to look ahead to, nu is what Adam would have after seeing it unclipped: |g| / M
  is then bounded by 1/sqrt(1 - b2), also for embedding rows that were hardly ever seen. Nothing is
  stored.
  """
  b2, count = opt.b2, jnp.asarray(moments.steps)
  nu = moments.nu
  if lookahead is not None:
    nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, nu, lookahead)
    count = count + 1

  def leaf(n):
    correction = 1 - jnp.asarray(b2, n.dtype) ** count
    M = (jnp.sqrt(n / jnp.where(count > 0, correction, 1)) + opt.eps) ** opt.precond_power
    return jnp.where(count > 0, M, 1)  # nothing remembered yet: the plain direction

  return jax.tree.map(leaf, nu)


def _divide(g: jax.Array, M: jax.Array) -> jax.Array:
  return jnp.where(g == 0, 0, g / jnp.where(g == 0, 1, M))


def perturbation(ray: Ray, rho: jax.Array | float) -> tuple[Params, jax.Array]:
  """eps, and whether there is one: of a zero or non-finite length there is none, so g stays g."""
  usable = jnp.isfinite(ray.length) & (ray.length > 0)
  scale = rho / jnp.where(usable, ray.length, 1)
  return jax.tree.map(lambda d: jnp.where(usable, scale * d, 0), ray.vector), usable
