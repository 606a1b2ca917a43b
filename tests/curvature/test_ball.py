"""The maximum over a ball against the closed form of the trust-region problem."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

from nanosam.curvature import ball


def quadratic(values, g, seed=0):
  """L(x) = g x + x^T H x / 2 around 0, with these eigenvalues; value and gradient."""
  U = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(g), len(g))))[0]
  H = jnp.asarray(U @ np.diag(values) @ U.T)

  def gradient(p):
    x = p["x"]
    return float(g @ x + x @ H @ x / 2), {"x": g + H @ x}

  return gradient, np.asarray(H)


def maximum(H, g, rho):
  """(nu - H) eps = g with |eps| = rho and nu above the largest eigenvalue."""
  values, U = np.linalg.eigh(H)
  c = U.T @ np.asarray(g)
  top = values[-1]
  nu = brentq(
    lambda nu: np.linalg.norm(c / (nu - values)) - rho,
    top + 1e-9,
    top + 1e3 * np.linalg.norm(c) / rho,
    xtol=1e-13,
  )
  eps = U @ (c / (nu - values))
  return float(np.asarray(g) @ eps + eps @ H @ eps / 2)


@pytest.mark.parametrize("rho", [0.01, 0.3, 3.0])
def test_ascent_finds_the_maximum_of_a_quadratic(x64, rho):
  """Indefinite, as Hessians are; after enough steps, and never below the first order."""
  g = jnp.asarray(np.random.default_rng(1).normal(size=12))
  gradient, H = quadratic(np.linspace(-0.6, 2.0, 12), g)
  params, at = {"x": jnp.zeros(12)}, {"x": g}
  exact = maximum(H, g, rho)
  first = gradient(ball.moved(params, ball.unit(at), rho))[0]
  found = [ball.highest(gradient, params, at, rho, steps) for steps in (1, 3, 5, 200)]
  assert found[0] == pytest.approx(first) and first < exact
  assert found == sorted(found)
  assert found[-1] == pytest.approx(exact, rel=1e-6)
  assert all(first - 1e-12 <= x <= exact * (1 + 1e-9) for x in found)
  assert found[2] - first > 0.5 * (exact - first)  # a few steps go most of the way


def test_the_highest_point_met_counts(x64):
  """Negative curvature larger than the positive one: the ascent can go down again."""
  g = jnp.array([1.0, 0.2])
  gradient, H = quadratic([-3.0, 1.0], g)
  params, at = {"x": jnp.zeros(2)}, {"x": g}
  found = [ball.highest(gradient, params, at, 1.0, steps) for steps in range(1, 12)]
  assert found == sorted(found) and found[-1] <= maximum(H, g, 1.0) + 1e-12


def test_an_infinite_loss_is_reported_as_such():
  found = ball.highest(lambda p: (np.nan, p), {"x": jnp.ones(2)}, {"x": jnp.ones(2)}, 1.0, 3)
  assert found == np.inf
