"""Sharpness as SAM defines it: max L(theta + eps) - L(theta) over |eps| <= rho, by ascent.

SAM itself stops at the first order, eps = rho g / |g|. The ascent begins there and goes on: eps =
rho g' / |g'| with the gradient g' at theta + eps. That is projected gradient ascent with a step so
long that eps lands on the sphere, so there is no step size to tune. Where the loss is convex no
step of it goes down. The highest loss met is reported: a lower bound of the maximum, never below
the first-order value.
"""

from collections.abc import Callable

import jax
import optax

from nanosam.model.transformer import Params


@jax.jit
def moved(params: Params, d: Params, distance: float | jax.Array) -> Params:
  return jax.tree.map(lambda p, d: p + distance * d, params, d)


@jax.jit
def unit(v: Params) -> Params:
  return optax.tree.scale(1 / optax.tree.norm(v), v)


def highest(
  gradient: Callable[[Params], tuple[float, Params]],
  params: Params,
  g: Params,
  rho: float,
  steps: int,
) -> float:
  """The highest loss on the way; `gradient` gives loss and gradient at a point, g is that here."""
  found = -float("inf")
  for _ in range(steps):
    loss, g = gradient(moved(params, unit(g), rho))
    if not loss < float("inf"):  # beyond what can be represented
      return float("inf")
    found = max(found, loss)
  return found
