"""The PAC-Bayes bound, piece by piece, against other ways to the same number."""

import math

import jax
import numpy as np
import pytest
from helpers.batches import random_batch
from helpers.toy import V, setting, toy
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from nanosam.curvature import pac_bayes
from nanosam.model import sharding


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 0.97])
@pytest.mark.parametrize("most", [1e-4, 0.1, 3.0])
def test_kl_inverse(p, most):
  q = pac_bayes.kl_inverse(p, most)
  assert p < q <= 1
  if q < 1:  # as close to it as a float can be
    assert pac_bayes.kl_coins(p, q) == pytest.approx(most, rel=1e-6)
  assert q <= p + math.sqrt(most / 2) + 1e-12  # Pinsker
  if p == 0:
    assert q == pytest.approx(1 - math.exp(-most))


def test_kl_inverse_at_the_ends():
  assert pac_bayes.kl_inverse(1.0, 0.1) == 1
  assert pac_bayes.kl_inverse(0.3, 1e9) == 1
  assert pac_bayes.kl_inverse(0.3, 0.0) == pytest.approx(0.3)


@pytest.mark.parametrize(("sigma", "s"), [(0.3, 1.0), (1.0, 0.4)])
def test_the_divergence_is_the_integral(sigma, s):
  a, b = np.array([0.5, -1.0, 0.2]), np.array([0.1, 0.3, 0.0])

  def along(mu, nu):
    q, p = norm(mu, sigma), norm(nu, s)
    return quad(lambda x: q.pdf(x) * (q.logpdf(x) - p.logpdf(x)), mu - 12 * sigma, mu + 12 * sigma)[
      0
    ]

  exact = sum(map(along, a, b))
  assert pac_bayes.divergence(3, sigma, s, float(np.linalg.norm(a - b))) == pytest.approx(exact)


def test_bounds_are_as_written():
  errors_KxG = np.array([[0.2, 0.4], [0.3, 0.5], [0.1, 0.6]])
  facts = {"units": 10**5, "parameters": 20, "distance": 0.7, "delta": 0.1}
  found = pac_bayes.bounds(errors_KxG, (0.01, 0.1), **facts)
  for bound, sigma, error in zip(found, (0.01, 0.1), (0.2, 0.5), strict=True):

    def solve(p, most):
      def kl(q):
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) - most

      return brentq(kl, p, 1 - 1e-12, xtol=1e-14)

    KL, s = min((pac_bayes.divergence(20, sigma, s, 0.7), s) for s in pac_bayes.PRIORS)
    at_most = solve(error, math.log(2 / 0.05) / 3)
    J = len(pac_bayes.PRIORS)
    most = (KL + math.log(2 * math.sqrt(1e5) * J / 0.05)) / 1e5
    wanted = (sigma, error, at_most, KL, s, solve(at_most, most))
    assert bound == pytest.approx(wanted, rel=1e-8)
    assert error < bound.train_error_at_most < bound.bound < 1
  fewer = pac_bayes.bounds(errors_KxG, (0.01, 0.1), **{**facts, "units": 100})
  assert all(few.bound > many.bound for few, many in zip(fewer, found, strict=True))


def test_the_monte_carlo_error_is_covered():
  """The mean of 32 draws in [0, 1] misses its limit in less than 5 % of 2000 trials."""
  rng = np.random.default_rng(0)
  for p in (0.05, 0.6, 0.95):
    means = rng.binomial(32, p, 2000) / 32  # coins vary most
    misses = [pac_bayes.kl_inverse(m, math.log(1 / 0.05) / 32) < p for m in means]
    assert np.mean(misses) < 0.05


def test_errors_under_noise():
  """Without noise those of the model; with little the same, with much those of guessing."""
  params, batch, _ = setting()
  batch = jax.tree.map(np.asarray, batch)
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  errors = pac_bayes.NoisyErrors(toy(), mesh)
  seen = []

  def rows(draw):
    seen.append(draw)
    return batch

  found_KxG = errors(params, rows, (0.0, 1e-6, 30.0), 8, jax.random.key(0))
  right = np.asarray(toy().correct(params, batch)) * batch.weights_BxL
  exact = 1 - right.sum(1) / batch.weights_BxL.sum(1)
  np.testing.assert_allclose(found_KxG[:, :2], exact.mean(), atol=1e-6)
  assert len({*found_KxG[:, 2]}) > 1  # noise of its own for each draw
  assert abs(found_KxG[:, 2].mean() - (1 - 1 / V)) < 0.15
  assert seen == [*range(8)]


def test_a_row_without_a_token_counts_as_wrong():
  params, *_ = setting()
  batch = jax.tree.map(np.array, random_batch(0, 4, 6, V))
  batch.weights_BxL[:] = 0
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  found = pac_bayes.NoisyErrors(toy(), mesh)(params, lambda _: batch, (0.0,), 1, jax.random.key(0))
  assert found.tolist() == [[1.0]]
