"""Eigenvalues and traces against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanosam.curvature import products
from nanosam.curvature.spectrum import LARGEST, SMALLEST, Lanczos, converge, hutchinson, mean


def symmetric(n, seed=0):
  A = np.random.default_rng(seed).normal(size=(n, n))
  return jnp.asarray(A + A.T)


def lanczos(A, keep=False, seed=0):
  n = len(A)
  return Lanczos(lambda v: A @ v, lambda: jax.random.normal(jax.random.key(seed), (n,)), keep)


def test_lanczos_with_all_vectors_kept_finds_the_whole_spectrum(x64):
  A = symmetric(20)
  found = lanczos(A, keep=True)
  for _ in range(20):
    found.advance()
  np.testing.assert_allclose(found.ritz()[0], np.linalg.eigvalsh(A), atol=1e-10)
  assert found.exhausted()
  x = found.eigenvector(LARGEST)
  assert np.linalg.norm(A @ x - found.eigenvalue(LARGEST).value * x) < 1e-9


@pytest.mark.parametrize("keep", [False, True])
def test_the_residual_is_what_is_reported(x64, keep):
  """At any moment |A x - value x| of the replayed vector, and a bound on the error."""
  A = symmetric(200)
  found = lanczos(A, keep)
  for _ in range(25):
    found.advance()
  exact = np.linalg.eigvalsh(A)
  for end in (LARGEST, SMALLEST):
    value, residual = found.eigenvalue(end)
    x = np.asarray(found.eigenvector(end))
    assert np.linalg.norm(A @ x - value * x) == pytest.approx(residual, rel=1e-6)
    assert np.abs(exact - value).min() <= residual
    assert 1e-6 < residual < 1


def test_lanczos_converges_to_the_wanted_ends_and_says_so(x64):
  A = symmetric(100)
  found = lanczos(A)
  assert converge(found, (LARGEST, SMALLEST), rtol=1e-6, most=100)
  exact = np.linalg.eigvalsh(A)
  assert found.eigenvalue(LARGEST).value == pytest.approx(exact[-1], rel=1e-9)
  assert found.eigenvalue(SMALLEST).value == pytest.approx(exact[0], rel=1e-9)
  assert not converge(lanczos(A), (LARGEST,), rtol=1e-6, most=5)


def test_lanczos_ends_where_there_is_no_more_to_find(x64):
  """Rank 2: after three products the rest is rounding."""
  u = np.random.default_rng(0).normal(size=(30, 2))
  found = lanczos(jnp.asarray(u @ u.T))
  assert converge(found, (LARGEST, SMALLEST), rtol=0, most=30)
  assert found.iterations <= 4
  exact = np.linalg.eigvalsh(u @ u.T)
  assert found.eigenvalue(LARGEST).value == pytest.approx(exact[-1], rel=1e-9)


def test_traces_stop_at_the_wanted_error(x64):
  A = symmetric(50) + 20 * jnp.eye(50)
  like = jnp.zeros(50)

  def sample(key):
    z = products.rademacher(key, like)
    return {"A": float(z @ (A @ z))}

  key = jax.random.key(0)
  means, taken = hutchinson(sample, key, ["A"], rtol=0.01, most=1000)
  assert 8 < taken < 1000
  assert means["A"].sem <= 0.01 * abs(means["A"].value)
  assert abs(means["A"].value - float(jnp.trace(A))) < 3 * means["A"].sem
  assert hutchinson(sample, key, ["A"], rtol=1e-9, most=20)[1] == 20
  assert mean([2.0]).sem == np.inf
