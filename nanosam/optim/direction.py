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
  """What is known of earlier gradients; None where nobody keeps such a thing."""

  mu: Params | None = None
  nu: Params | None = None
  steps: jax.Array | int = 0  # that Adam has seen
  last: Params | None = None  # the gradient of the step before
  updates: jax.Array | int | None = None  # made so far, by any optimizer


class Ray(NamedTuple):
  vector: Params
  length: jax.Array
  most: jax.Array | None = None  # that the vector may be multiplied by


class Direction(NamedTuple):
  """`ray(g, params, moments, opt)`; g is None if no gradient is needed."""

  ray: Callable[[Any, Params, Moments, Any], Ray]
  needs_gradient: bool = True
  needs_mu: bool = False
  needs_nu: bool = False
  substitute: Callable[[Params, Moments], Params] | None = None  # for g, where it is not computed
  needs_count: bool = False  # of the updates made


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


def _equal_rise(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  """LE-SAM (arXiv 2605.10183): eps = rho g/|g|^2, so that rho is the rise of the loss, to first
  order; it is at most `rho_max` long. (The paper's sigma is our rho; it anneals it to 0.)"""
  norm = optax.tree.norm(g)
  return Ray(g, norm**2, most=opt.rho_max / jnp.where(norm > 0, norm, 1))


def _top(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  """g in the `top_share` of the arrays with the longest gradients, scaled as if it were in all."""
  leaves, structure = jax.tree.flatten(g)
  norms = jnp.stack([optax.tree.norm(x) for x in leaves])
  least = jnp.sort(norms)[-max(int(opt.top_share * len(leaves)), 1)]
  kept = [jnp.where(norm >= least, x, 0) for norm, x in zip(norms, leaves, strict=True)]
  return Ray(jax.tree.unflatten(structure, kept), optax.tree.norm(norms))


def _random_share(g: Params, params: Params, moments: Moments, opt: Any) -> Ray:
  """Of ESAM (Du et al., ICLR 2022; arXiv 2110.03141): g in a random share of the weights, drawn
  anew at each step, and longer by 1/share: rho is the length that eps has per share."""
  share = opt.weight_share
  drawn = _drawn(jax.random.uniform, 1, params, moments)
  kept = jax.tree.map(lambda x, u: jnp.where(u < share, x, 0), g, drawn)
  return Ray(kept, share * optax.tree.norm(kept))


def _momentum(g: None, params: Params, moments: Moments, opt: Any) -> Ray:
  m = jax.tree.map(lambda m: opt.momentum_sign * m, moments.mu)
  return Ray(m, optax.tree.norm(m))


def _preconditioned_momentum(g: None, params: Params, moments: Moments, opt: Any) -> Ray:
  m = _momentum(g, params, moments, opt).vector
  vector = jax.tree.map(_divide, m, denominator(moments, opt, lookahead=None))
  return Ray(vector, optax.tree.norm(vector))


def _last(params: Params, moments: Moments) -> Params:
  return moments.last


def _drawn(draw: Callable[..., jax.Array], seed: int, params: Params, moments: Moments) -> Params:
  """Independent random numbers, which depend on the update's number alone."""
  key = jax.random.fold_in(jax.random.key(seed), jnp.asarray(moments.updates))
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(key, len(leaves))
  drawn = [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(structure, drawn)


def _noise(params: Params, moments: Moments) -> Params:
  return _drawn(jax.random.normal, 0, params, moments)


gradient = Direction(_gradient)
last = Direction(_gradient, needs_gradient=False, substitute=_last)
random = Direction(_gradient, needs_gradient=False, substitute=_noise, needs_count=True)
preconditioned = Direction(_preconditioned, needs_nu=True)
adaptive = Direction(_adaptive)
equal_rise = Direction(_equal_rise)
top = Direction(_top)
random_share = Direction(_random_share, needs_count=True)
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


RHO_SCALINGS = ("global", "layer")


def layerwise(ray: Ray) -> Ray:
  """The same direction with each array's part as long as its layer bears: mu-P^2, arXiv 2411.00075.

  Its condition is |eps_l| = rho sqrt(fan_out / fan_in) in spectral norm, in which a gradient is
  about as long as in Frobenius norm: each part is normalised by itself. An embedding counts as the
  input layer that it is, also if it is tied, and a vector, such as a norm's scale, as one with a
  single input. rho is then relative to the natural size of a layer, whatever the width.
  """

  def part(path: Any, d: jax.Array) -> jax.Array:
    stacked, matrix = d.ndim > 2, d.ndim > 1
    axes = tuple(range(d.ndim))[-2:] if stacked else None  # layers in one array: each by itself
    fan_in, fan_out = d.shape[-2:] if matrix else (1, d.size)
    if jax.tree_util.keystr(path[-1:], simple=True) == "unembed":  # stored as V x D, used as D x V
      fan_in, fan_out = fan_out, fan_in
    length = jnp.sqrt(jnp.sum(d**2, axes, keepdims=stacked))
    return d * ((fan_out / fan_in) ** 0.5 / jnp.where(length > 0, length, 1))

  usable = jnp.isfinite(ray.length) & (ray.length > 0)
  vector = jax.tree_util.tree_map_with_path(part, ray.vector)
  return Ray(vector, jnp.where(usable, jnp.ones_like(ray.length), ray.length))


def perturbation(ray: Ray, rho: jax.Array | float) -> tuple[Params, jax.Array]:
  """eps, and whether there is one: of a zero or non-finite length there is none, so g stays g."""
  usable = jnp.isfinite(ray.length) & (ray.length > 0)
  scale = rho / jnp.where(usable, ray.length, 1)
  if ray.most is not None:
    scale = jnp.minimum(scale, ray.most)
  return jax.tree.map(lambda d: jnp.where(usable, scale * d, 0), ray.vector), usable
