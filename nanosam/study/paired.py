"""Intervals for paired differences between two methods.

x[s, r] is the difference on unit r of the eval set between two runs that share seed and data order
s. Both are samples: of possible training runs, and of possible eval texts. The model is
x = mu + seed_s + unit_r + rest_sr with all three random, so the mean over all of x has variance
var(seed)/S + var(unit)/R + var(rest)/(S R). It is estimated from the mean squares of a two-way
layout, with Satterthwaite's approximation for the degrees of freedom, and the interval is at least
as wide as those over seeds or units alone. Few seeds make a wide interval, as they should. In
simulations with normal noise and 2 to 5 seeds, 95 % intervals cover the truth in 95 to 99 % of
cases.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from nanosam.data.batch import rows_per_unit


class Interval(NamedTuple):
  low: float
  high: float
  covers: str  # what is taken to vary


SEEDS = "other seeds and data orders, on this eval set"
UNITS = "other eval text, for these very runs: says nothing about other seeds"
BOTH = "other seeds, data orders and eval text"


def student(mean: float, variance: float, dof: float, confidence: float, covers: str) -> Interval:
  """mean +- t sqrt(variance)."""
  half = float(special.stdtrit(dof, (1 + confidence) / 2)) * math.sqrt(variance)
  return Interval(mean - half, mean + half, covers)


def _over(x_N: np.ndarray, confidence: float, covers: str) -> Interval | None:
  N = len(x_N)
  return student(x_N.mean(), x_N.var(ddof=1) / N, N - 1, confidence, covers) if N > 1 else None


def over_seeds(delta_S: np.ndarray, confidence: float) -> Interval | None:
  return _over(delta_S, confidence, SEEDS)


def over_units(x_SxR: np.ndarray, confidence: float) -> Interval | None:
  return _over(x_SxR.mean(0), confidence, UNITS)


def over_both(x_SxR: np.ndarray, confidence: float) -> Interval | None:
  S, R = x_SxR.shape
  if S < 2 or R < 2:
    return None
  mean, row_S, column_R = x_SxR.mean(), x_SxR.mean(1), x_SxR.mean(0)
  seeds = R * row_S.var(ddof=1)  # mean squares
  units = S * column_R.var(ddof=1)
  rest = np.sum((x_SxR - row_S[:, None] - column_R[None] + mean) ** 2) / ((S - 1) * (R - 1))
  # Noise can make the unbiased estimate smaller than either part, which is impossible.
  total = max(seeds + units - rest, seeds, units)
  if total == 0:
    return Interval(mean, mean, BOTH)
  parts = seeds**2 / (S - 1) + units**2 / (R - 1) + rest**2 / ((S - 1) * (R - 1))
  found = student(mean, total / (S * R), max(total**2 / parts, 1.0), confidence, BOTH)
  # If two or three seeds agree by chance, Satterthwaite's interval is too narrow; but an interval
  # that covers more must not be narrower than one that covers less.
  alone = (over_seeds(row_S, confidence), over_units(x_SxR, confidence))
  half = max(i.high - mean for i in (found, *alone) if i)
  return Interval(mean - half, mean + half, BOTH)


def units(difference_SxR: np.ndarray, weight_R: np.ndarray, documents: int | None) -> np.ndarray:
  """Differences of summed losses by sequence -> differences of the mean loss by unit, [S, units].

  A unit is a stretch of sequences that is independent of the others (data/batch.py). The mean over
  units is exactly the difference of the losses, whatever the weights.
  """
  starts = np.arange(0, len(weight_R), rows_per_unit(len(weight_R), documents))
  nll_SxU = np.add.reduceat(difference_SxR, starts, axis=1)
  weight_U = np.add.reduceat(weight_R, starts)
  delta_Sx1 = nll_SxU.sum(1, keepdims=True) / weight_U.sum()
  return delta_Sx1 + (nll_SxU - delta_Sx1 * weight_U[None]) / weight_U.mean()


def detectable(deviation: float, pairs: int, power: float = 0.8, level: float = 0.05) -> float:
  """The smallest true difference that a two-sided paired t-test finds with this power; `deviation`
  is that of the paired differences."""
  t = special.stdtrit(pairs - 1, 1 - level / 2) + special.stdtrit(pairs - 1, power)
  return float(t) * deviation / math.sqrt(pairs)
