"""A PAC-Bayes bound on the error of the trained model under Gaussian noise.

Predictors are drawn from Q = N(theta, sigma^2 I); the prior is P = N(theta_0, s^2 I), theta_0 the
parameters at initialisation, which know nothing of the data. A unit is a training sequence, its
loss the share of its tokens that are not the likeliest one: in [0, 1], as such bounds need (the
loss in nats is unbounded). For n independent units, with probability 1 - delta/2, for every Q at
once (Seeger; Maurer 2004, n >= 8)

  kl(train error of Q || true error of Q) <= (KL(Q || P) + ln(2 sqrt(n) J / (delta/2))) / n,

kl being that of two coins and KL(Q || P) = (d (sigma^2/s^2 - 1 + ln(s^2/sigma^2)) + |theta -
theta_0|^2 / s^2) / 2 for d parameters. A union bound pays for the choice of s among J priors. The
train error of Q is a mean over k draws, each with fresh noise and fresh training rows: with
probability 1 - delta/2, for all G values of sigma on the grid, kl(mean || train error of Q) <= ln(G
/ (delta/2)) / k: a second union bound, for the Monte Carlo error and the choice of sigma.

The bound is about the noisy predictor, and KL grows with the number of parameters: for a model with
more parameters than training sequences expect it to be vacuous, no better than guessing. A formula
in circulation puts sigma^2 = 1 / tr(H) into KL with prior over posterior variance, the wrong way
round, and an unbounded loss: that is no bound, and is not used here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from nanosam.curvature.products import place
from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import Params

PRIORS = 10 ** np.linspace(-5, 1, 121)  # s: fixed before anything is measured
FEWEST = 8  # units for which the theorem holds
ASSUMPTIONS = (
  "training documents (or images) are independent draws; n counts the training rows, but no more "
  "than there are documents, as if each had equally many rows",
  "the tokenizer, the settings and the initialisation were chosen without these data",
  "it bounds the error of the parameters plus Gaussian noise, on rows of this length",
)


class Bound(NamedTuple):
  """For one sigma."""

  sigma: float
  train_error: float  # under noise, mean over the draws
  train_error_at_most: float  # with the Monte Carlo error
  KL: float
  prior: float  # its standard deviation
  bound: float


def kl_coins(p: float, q: float) -> float:
  """kl(p || q) of two coins."""

  def part(a: float, b: float) -> float:
    return 0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b)

  return part(p, q) + part(1 - p, 1 - q)


def kl_inverse(p: float, most: float) -> float:
  """The largest q with kl(p || q) <= most, rounded up."""
  low, high = p, 1.0
  while (middle := (low + high) / 2) not in (low, high):
    low, high = (middle, high) if kl_coins(p, middle) <= most else (low, middle)
  return high


def divergence(parameters: int, sigma: float, s: Any, distance: float) -> Any:
  """KL(N(a, sigma^2 I) || N(b, s^2 I)) with |a - b| = distance, in nats."""
  ratio = (sigma / s) ** 2
  return (parameters * (ratio - 1 - np.log(ratio)) + (distance / s) ** 2) / 2


def bounds(
  errors_KxG: np.ndarray,
  sigmas: Sequence[float],
  *,
  units: int,
  parameters: int,
  distance: float,
  delta: float,
) -> list[Bound]:
  """All of them hold at once with probability 1 - delta: take the least."""
  draws = len(errors_KxG)
  found = []
  for sigma, error in zip(sigmas, errors_KxG.mean(0).tolist(), strict=True):
    at_most = kl_inverse(error, math.log(2 * len(sigmas) / delta) / draws)
    KL_J = divergence(parameters, sigma, PRIORS, distance)
    best = int(np.argmin(KL_J))
    choice = math.log(4 * math.sqrt(units) * len(PRIORS) / delta)
    bound = kl_inverse(at_most, (float(KL_J[best]) + choice) / units)
    found.append(Bound(sigma, error, at_most, float(KL_J[best]), float(PRIORS[best]), bound))
  return found


def gaussian(key: jax.Array, like: Params) -> Params:
  """Of variance 1; the same on any mesh."""
  leaves, tree = jax.tree.flatten(like)
  keys = jax.random.split(key, len(leaves))
  noise = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return sharding.split_like_parameters(jax.tree.unflatten(tree, noise))


class NoisyErrors:
  """Shares of wrong tokens by row, with noise on the parameters."""

  def __init__(self, model: Classifier, mesh: Mesh):
    self._mesh = mesh

    def errors(params: Params, key: jax.Array, sigma: jax.Array, batch: Batch) -> jax.Array:
      batch = jax.tree.map(sharding.split_over_batch, batch)
      moved = jax.tree.map(lambda p, z: p + sigma * z, params, gaussian(key, params))
      weight_R = jnp.sum(batch.weights_BxL, 1)
      right_R = jnp.sum(model.correct(moved, batch) * batch.weights_BxL, 1)
      return jnp.where(weight_R > 0, 1 - right_R / jnp.maximum(weight_R, 1), 1)

    self._errors = jax.jit(errors, out_shardings=sharding.replicated(mesh))

  def __call__(
    self,
    params: Params,
    rows: Callable[[int], Batch],
    sigmas: Sequence[float],
    draws: int,
    key: jax.Array,
    report: Callable[[int], None] = lambda _: None,
  ) -> np.ndarray:
    """Means over rows by draw and sigma, K x G; each draw has noise and rows of its own."""
    found_KxG = []
    for draw in range(draws):
      batch, noise = rows(draw), jax.random.fold_in(key, draw)
      placed, count = place(batch, self._mesh, 1), len(batch.targets_BxL)
      with jax.set_mesh(self._mesh), jax.default_matmul_precision("highest"):
        by_row = [self._errors(params, noise, sigma, placed) for sigma in sigmas]
      found_KxG.append([float(np.mean(x[:count], dtype=float)) for x in jax.device_get(by_row)])
      report(draw + 1)
    return np.asarray(found_KxG)


@jax.jit
def _distance(a: Params, b: Params) -> jax.Array:
  return optax.tree.norm(jax.tree.map(jnp.subtract, a, b))


def distance(a: Params, b: Params) -> float:
  return float(_distance(a, b))
