"""Times that a feature takes from v = e to v = u early in training, by the paper's Theorem 4.2.

A head is k = q = v e_m, everything else is 0, terms beyond v^2 are dropped, time is in units of tau
(a step of size eta lasts 2 eta of them), and SAM's eps moves v by -r, r = rho / sqrt(3).
"""

from typing import Any

import numpy as np

from nanosam.paper.simplicity.training import shannon

Floats = Any  # a number or an array of them


def gd_time(e: Floats, u: Floats, l: Floats) -> Floats:
  """Eq. 10: v' = l^2 v^2."""
  return (1 / e - 1 / u) / l**2


def sam_time(e: Floats, u: Floats, l: Floats, rho: float) -> Floats:
  """SAM's own: v' = l^2 (v - r)^2, so it takes GD's time from e - r to u - r; for e > r."""
  r = rho / 3**0.5
  return gd_time(e - r, u - r, l)


def sam_time_eq9(e: Floats, u: Floats, l: Floats, rho: float) -> Floats:
  """Eq. 9: v' = l^2 (v^2 - p v), p = 2 r, which drops l^2 r^2; for e > p."""
  p = 2 * rho / 3**0.5
  return np.log((1 - p / u) / (1 - p / e)) / (l**2 * p)


def entropies(eigenvalues_D: np.ndarray, e: float, rho: float) -> dict[str, float]:
  """Of Theorem 4.4's times, each feature on a clock of its own from e to l^(-1/3)."""
  l_D, u_D = eigenvalues_D, eigenvalues_D ** (-1 / 3)
  times = {
    "gd": gd_time(e, u_D, l_D),
    "eq9": sam_time_eq9(e, u_D, l_D, rho),
    "exact": sam_time(e, u_D, l_D, rho),
  }
  return {name: float(shannon(t_D[None])[0]) for name, t_D in times.items()}
