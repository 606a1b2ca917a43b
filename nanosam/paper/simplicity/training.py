"""Training of the linear attention model, and when it learned what."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanosam.model.linear_attention import Moments, Params, loss, matrix
from nanosam.optim.transform import value_and_grad

Gradient = Callable[[Params, Moments], Params]
FRACTIONS = (0.5, 0.25, 0.75)  # of its final value, at which a feature counts as learned
EVERY = 10  # steps between two records of A


def gradient(method: str, rho: float) -> Gradient:
  """By a method of the library."""
  call = value_and_grad(matrix, loss, method=method, rho=rho)
  return lambda params, moments: call(params, moments)[1]


def per_head_sam(rho: float) -> Gradient:
  """SAM with a perturbation of length rho in each head, and not over all of them."""
  plain = gradient("sam", 0.0)

  def perturbed(params: Params, moments: Moments) -> Params:
    g = plain(params, moments)
    square_H = g["v"] ** 2 + jnp.sum(g["k"] ** 2 + g["q"] ** 2, 1)
    scale_H = rho / jnp.sqrt(jnp.where(square_H > 0, square_H, 1))
    scale = {"v": scale_H, "k": scale_H[:, None], "q": scale_H[:, None]}
    return plain({name: w + scale[name] * g[name] for name, w in params.items()}, moments)

  return perturbed


class Trained(NamedTuple):
  times_FxD: jax.Array  # the step after which a feature was learned, by FRACTIONS; nan if never
  A_TxDxD: jax.Array  # after 0, EVERY, 2 EVERY ... steps


def train(
  gradient: Gradient,
  params: Params,
  moments: Moments,
  final_D: np.ndarray,
  step_size: float,
  steps: int,
) -> Trained:
  """Gradient descent on one data set; vmap it over seeds."""
  goals_FxD = jnp.outer(jnp.array(FRACTIONS), jnp.asarray(final_D))

  def step(carry: tuple[Params, jax.Array], t: jax.Array) -> tuple[tuple[Params, jax.Array], None]:
    params, times_FxD = carry
    g = gradient(params, moments)
    params = jax.tree.map(lambda w, x: w - step_size * x, params, g)
    learned_FxD = jnp.diag(matrix(params))[None] >= goals_FxD
    return (params, jnp.where(learned_FxD & jnp.isnan(times_FxD), t + 1.0, times_FxD)), None

  def block(
    carry: tuple[Params, jax.Array], start: jax.Array
  ) -> tuple[tuple[Params, jax.Array], jax.Array]:
    carry, _ = jax.lax.scan(step, carry, start + jnp.arange(EVERY))
    return carry, matrix(carry[0])

  begin = (params, jnp.full(goals_FxD.shape, jnp.nan))
  (_, times_FxD), A_TxDxD = jax.lax.scan(block, begin, jnp.arange(0, steps, EVERY))
  return Trained(times_FxD, jnp.concatenate([matrix(params)[None], A_TxDxD]))


def entropy(times_SxD: np.ndarray) -> np.ndarray:
  """Of the shares of time between one feature and the next; nan if a feature was never learned.

  It is ln D if the features are learned at equal distances, and 0 if all come at once.
  """
  sorted_SxD = np.sort(times_SxD, 1)
  return shannon(np.diff(sorted_SxD, axis=1, prepend=0))


def shannon(parts_SxD: np.ndarray) -> np.ndarray:
  """Of parts of a whole."""
  p_SxD = parts_SxD / parts_SxD.sum(1, keepdims=True)
  return -np.sum(p_SxD * np.log(np.where(p_SxD == 0, 1, p_SxD)), 1)
