"""The spectral density against matfree, dense matrices and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matfree import decomp, funm

from nanosam.curvature import products
from nanosam.curvature.density import Quadrature, density, moment, quadrature
from nanosam.curvature.spectrum import Lanczos


def symmetric(n, seed=0):
  A = np.random.default_rng(seed).normal(size=(n, n))
  return jnp.asarray(A + A.T) / np.sqrt(n)


def found_by(A, steps, seed=0, keep=True, dtype=float):
  like = jnp.zeros(len(A), dtype)
  return quadrature(
    Lanczos(lambda v: A @ v, lambda: products.rademacher(jax.random.key(seed), like), keep), steps
  )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("f", [jnp.exp, lambda x: jnp.exp(-(((x - 0.5) / 0.3) ** 2))])
def test_quadratures_are_those_of_matfree(x64, f, keep):
  """z^T f(A) z from the same z by the same number of products."""
  A, steps = symmetric(80), 12
  z = products.rademacher(jax.random.key(3), jnp.zeros(80))
  oracle = funm.monte_carlo_funm_sym(funm.dense_funm_sym_eigh(f), decomp.tridiag_sym(steps))
  q = found_by(A, steps, seed=3, keep=keep)
  assert len(q.nodes) == steps and sum(q.weights) == pytest.approx(1)
  ours = 80 * np.asarray(q.weights) @ np.asarray(f(jnp.asarray(q.nodes)))
  assert ours == pytest.approx(float(oracle(lambda v: A @ v, z)), rel=1e-9)


def test_moments_up_to_twice_the_steps_are_exact(x64):
  A, steps = symmetric(50), 5
  z = np.asarray(products.rademacher(jax.random.key(0), jnp.zeros(50)))
  q = found_by(A, steps)
  for power in range(2 * steps):
    exact = z @ np.linalg.matrix_power(np.asarray(A), power) @ z / 50
    assert moment(q, power) == pytest.approx(exact, rel=1e-8, abs=1e-10)
  beyond = z @ np.linalg.matrix_power(np.asarray(A), 2 * steps) @ z / 50
  assert moment(q, 2 * steps) != pytest.approx(beyond, rel=1e-6)


def test_the_density_is_that_of_the_dense_eigenvalues(x64):
  """A curve whose integral is 1: exactly what these probes see, and nearly the truth."""
  A = symmetric(30)
  exact = np.linalg.eigvalsh(A)
  probes = [found_by(A, 30, seed) for seed in range(24)]
  curve = density(probes, width=0.05)
  x, y = np.asarray(curve["eigenvalue"]), np.asarray(curve["density"])
  assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-4)
  z = (x[:, None] - exact) / curve["width"]
  wanted = np.exp(-0.5 * z**2).mean(1) / curve["width"] / np.sqrt(2 * np.pi)
  # A mean over all 2^30 vectors of signs would be exact; this is the error of the mean over 24.
  z_PxN = np.array([products.rademacher(jax.random.key(s), jnp.zeros(30)) for s in range(24)])
  share_N = np.mean((z_PxN @ np.linalg.eigh(A)[1]) ** 2, axis=0) / 30
  sampled = np.exp(-0.5 * z**2) @ share_N / curve["width"] / np.sqrt(2 * np.pi)
  np.testing.assert_allclose(y, sampled, atol=1e-8)
  assert np.abs(y - wanted).max() < 0.5 * wanted.max()
  assert np.trapezoid(np.abs(y - wanted), x) < 0.3


def test_copies_share_the_weight_of_one():
  """Signs are exact on a diagonal matrix. fp32, no reorthogonalisation: outliers return."""
  values = np.concatenate([np.linspace(-1, 1, 998), [50, 100]]).astype(np.float32)
  q = found_by(jnp.diag(values), 60, keep=False, dtype=jnp.float32)
  nodes, weights = np.asarray(q.nodes), np.asarray(q.weights)
  for outlier in (50, 100):
    near = np.abs(nodes - outlier) < 0.01
    assert near.sum() > 1
    assert weights[near].sum() == pytest.approx(1 / 1000, rel=1e-3)
  assert moment(q, 1) * 1000 == pytest.approx(150, rel=1e-3)
  kept = found_by(jnp.diag(values), 60, dtype=jnp.float32)
  assert (np.abs(np.asarray(kept.nodes) - 100) < 0.01).sum() == 1


def test_one_eigenvalue_alone_is_a_gaussian():
  curve = density([Quadrature([2.0], [1.0])])
  assert np.trapezoid(curve["density"], curve["eigenvalue"]) == pytest.approx(1, abs=1e-4)
  assert curve["eigenvalue"][np.argmax(curve["density"])] == pytest.approx(2, abs=curve["width"])
