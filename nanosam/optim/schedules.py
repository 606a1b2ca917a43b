"""Learning-rate schedules: a linear warmup, then one of several ways down."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]


DECAY_TYPES = ("cosine", "linear", "rsqrt", "constant", "wsd")
RHO_SCHEDULES = ("constant", "warmup", "lr", "piecewise")


def _cosine(progress, peak, final):
  return final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _linear(progress, peak, final):
  return peak + (final - peak) * progress


def learning_rate(
  *,
  decay_type: str,
  init: float,
  peak: float,
  final: float,
  warmup_steps: int,
  num_train_steps: int,
  decay_fraction: float,
) -> Schedule:
  """From `init` to `peak` over the warmup, then down to `final` at the last step.

  `rsqrt` and `constant` have no end and ignore `final`; `wsd` holds the peak and decays linearly
  over the last `decay_fraction` of training.
  """
  decay_steps = max(num_train_steps - warmup_steps, 1)
  cooldown = max(round(decay_fraction * num_train_steps), 1)
  decays: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda s: _cosine(jnp.clip((s - warmup_steps) / decay_steps, 0, 1), peak, final),
    "linear": lambda s: _linear(jnp.clip((s - warmup_steps) / decay_steps, 0, 1), peak, final),
    "rsqrt": lambda s: peak * jnp.sqrt(max(warmup_steps, 1) / jnp.maximum(s, max(warmup_steps, 1))),
    "constant": lambda s: jnp.full_like(s, peak),
    "wsd": lambda s: _linear(
      jnp.clip((s - (num_train_steps - cooldown)) / cooldown, 0, 1), peak, final
    ),
  }
  decay = decays[decay_type]

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    warm = init + (peak - init) * step / max(warmup_steps, 1)
    return jnp.where(step < warmup_steps, warm, decay(step))

  return schedule


def rho(
  *,
  kind: str,
  rho: float,
  warmup_steps: int,
  pieces: str,
  num_train_steps: int,
  relative_learning_rate: Schedule,
) -> float | Schedule:
  """The radius over time, or the float it always is.

  `warmup` rises linearly from 0; `lr` is proportional to the learning rate; `piecewise` multiplies
  by the last of `pieces` ("fraction:factor,...") whose fraction of training has passed, and by 0
  before the first.
  """
  if kind == "constant" or rho == 0:
    return float(rho)
  if kind == "warmup":
    return lambda step: rho * jnp.clip(jnp.asarray(step, jnp.float32) / max(warmup_steps, 1), 0, 1)
  if kind == "lr":
    return lambda step: rho * relative_learning_rate(step)
  parsed = parse_pieces(pieces)
  starts = jnp.asarray([round(fraction * num_train_steps) for fraction, _ in parsed])
  factors = jnp.asarray([0.0, *(factor for _, factor in parsed)], jnp.float32)
  return lambda step: rho * factors[jnp.sum(jnp.asarray(step) >= starts)]


def parse_pieces(text: str) -> list[tuple[float, float]]:
  """ "0.8:1" -> [(0.8, 1.0)]; ValueError if it is not of that form, in rising order."""
  pieces = [tuple(map(float, piece.split(":"))) for piece in text.split(",")]
  good = all(len(p) == 2 and 0 <= p[0] <= 1 and p[1] >= 0 for p in pieces)
  if not good or pieces != sorted(pieces):
    raise ValueError("write fraction:factor,fraction:factor with rising fractions in [0, 1]")
  return [(p[0], p[1]) for p in pieces]
