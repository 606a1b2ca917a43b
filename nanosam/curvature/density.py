"""The density of a symmetric operator's eigenvalues, by stochastic Lanczos quadrature.

For a random vector z of signs and n parameters, z^T f(A) z / n has the mean (1/n) sum_i
f(lambda_i). m steps of Lanczos from z give m nodes and m weights (Ritz values, and the squares of
the first components of their vectors) whose sum replaces it, exactly for polynomials up to degree
2m - 1. The mean over a few z is the density: for large n they hardly differ. It is then broadened
by a Gaussian.

Without reorthogonalisation rounding lets a converged direction return: a node appears several
times, and its copies share the weight of the one. The sum stays right, because the recurrence is
still that of a matrix whose eigenvalues lie in tight clusters around the true ones; but nodes spent
on copies do not resolve the bulk, so it takes more steps for the same detail.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanosam.curvature.spectrum import Lanczos

POINTS = 512  # of the curve
WIDTH = 0.01  # standard deviation of the Gaussian, as a part of the spectrum's extent


class Quadrature(NamedTuple):
  nodes: list[float]
  weights: list[float]  # they sum to 1


def quadrature(
  lanczos: Lanczos, steps: int, report: Callable[[Lanczos], None] = lambda _: None
) -> Quadrature:
  """By `steps` products, or fewer if there is nothing more to find."""
  for _ in range(steps):
    lanczos.advance()
    report(lanczos)
    if lanczos.exhausted():
      break
  nodes, vectors = lanczos.ritz()
  return Quadrature(nodes.tolist(), (vectors[0] ** 2).tolist())


def density(found: Sequence[Quadrature], width: float = WIDTH) -> dict[str, Any]:
  """The mean over probes as a curve whose integral is 1."""
  low, high = min(min(q.nodes) for q in found), max(max(q.nodes) for q in found)
  sigma = width * ((high - low) or max(abs(high), 1e-30))
  x = np.linspace(low - 5 * sigma, high + 5 * sigma, POINTS)
  y = np.mean([_gaussians(x, q, sigma) for q in found], axis=0)
  return {"width": sigma, "eigenvalue": x.tolist(), "density": y.tolist()}


def _gaussians(x_X: np.ndarray, q: Quadrature, sigma: float) -> np.ndarray:
  z_XxM = (x_X[:, None] - np.asarray(q.nodes)) / sigma
  return np.exp(-0.5 * z_XxM**2) @ np.asarray(q.weights) / (sigma * np.sqrt(2 * np.pi))


def moment(q: Quadrature, power: int) -> float:
  """Mean of lambda^power: the first is the trace over the number of parameters."""
  return float(np.asarray(q.weights) @ np.asarray(q.nodes) ** power)
