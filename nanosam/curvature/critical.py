"""Critical sharpness lambda_c = 2 / eta_c (arXiv 2601.16979), from forward passes alone.

eta_c is the smallest step size along an update direction d at which the loss rises above its value:
L(theta - eta d) > L(theta). For a quadratic loss eta_c = 2 g^T d / d^T H d; along the gradient, d =
g, lambda_c is then g^T H g / |g|^2, which is at most lambda_max. Along the base optimizer's update
d has the learning rate taken out, so training moves by lr * d, and the loss rises in that step if
lambda_c > 2 / lr.

Two losses near theta give a parabola and with it a first guess; the guess is doubled or halved
until two step sizes enclose a crossing, and bisected. Coming down from a guess that is too large,
the search finds a crossing that need not be the first one. About nine forward passes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from nanosam.curvature.products import Surface, inner
from nanosam.model import sharding
from nanosam.model.transformer import Params
from nanosam.optim import base

TOLERANCE = 0.02  # of eta_c, relative
FALL = 0.02  # of the loss, if it were linear: where the parabola is taken
FAR = 64  # times that far is the parabola believed
MOST = 60  # doublings or halvings


def sharpness(
  surface: Surface, params: Params, g: Params, d: Params, tolerance: float = TOLERANCE
) -> float | None:
  """lambda_c along d; None if the loss does not fall along it, or nowhere rises."""
  eta = step_size(lambda eta: surface.loss(params, d, -eta), inner(g, d), tolerance)
  return None if eta is None else 2 / eta


def step_size(
  loss: Callable[[float], float], slope: float, tolerance: float = TOLERANCE
) -> float | None:
  """eta_c of a loss as a function of the step size; it falls by `slope` at 0."""
  here = loss(0.0)
  if not (0 < slope < math.inf and math.isfinite(here)):
    return None

  def rises(eta: float) -> bool:
    return not loss(eta) <= here  # a loss that is no number has risen

  trial = FALL * (abs(here) or 1.0) / slope
  bend = 2 * (loss(trial) - here + slope * trial) / trial**2
  guess = min(2 * slope / bend, FAR * trial) if bend > 0 else FAR * trial
  too_far = rises(guess)
  factor = 0.5 if too_far else 2.0
  for _ in range(MOST):
    last, guess = guess, guess * factor
    if rises(guess) != too_far:
      low, high = sorted((last, guess))
      return _bisected(rises, low, high, tolerance)
  return None


def _bisected(rises: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
  while high > low * (1 + 2 * tolerance):
    middle = math.sqrt(low * high)
    low, high = (low, middle) if rises(middle) else (middle, high)
  return math.sqrt(low * high)


def update_direction(opt: Any, abstract_params: Params) -> Callable[[Params, Any, Params], Params]:
  """d of the base optimizer, of (gradient, its state, parameters): what it would subtract, over lr.

  Clipping, momentum and weight decay are in it. The state is read and not changed.
  """
  unscaled = base.make_base(opt, abstract_params, rate=optax.constant_schedule(1.0))

  def direction(g: Params, opt_state: Any, params: Params) -> Params:
    updates, _ = unscaled.update(g, opt_state, params)
    return sharding.split_like_parameters(optax.tree.scale(-1.0, updates))

  return jax.jit(direction)
