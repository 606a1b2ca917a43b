"""The learning rate and rho over time, as functions of the updates made."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]


DECAY_TYPES = ("cosine", "linear", "rsqrt", "constant", "wsd")
PHASES = {"late": "0.8:1", "mid": "0.4:1,0.6:0"}  # names for pieces: the last fifth, the middle one
RHO_SCHEDULES = ("constant", "warmup", "lr", "piecewise", *PHASES)


def _cosine(progress, peak, final):
  return final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _linear(progress, peak, final):
  return peak + (final - peak) * progress


def learning_rate(opt: Any) -> Schedule:
  """From the initial rate to the peak over the warmup, then down to the final one at the last step.

  `rsqrt` and `constant` have no end and ignore the final rate; `wsd` holds the peak and decays
  linearly over the last `wsd_decay_fraction` of training. All but `wsd` are Nanodo's.
  """
  init, peak, final = opt.init_learning_rate, opt.peak_learning_rate, opt.final_learning_rate
  warmup_steps, num_train_steps = opt.warmup_steps, opt.num_train_steps
  decay_steps = max(num_train_steps - warmup_steps, 1)
  cooldown = max(round(opt.wsd_decay_fraction * num_train_steps), 1)
  decays: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda s: _cosine(jnp.clip((s - warmup_steps) / decay_steps, 0, 1), peak, final),
    "linear": lambda s: _linear(jnp.clip((s - warmup_steps) / decay_steps, 0, 1), peak, final),
    "rsqrt": lambda s: peak * jnp.sqrt((1 + warmup_steps) / (1 + s)),
    "constant": lambda s: jnp.full_like(s, peak),
    "wsd": lambda s: _linear(
      jnp.clip((s - (num_train_steps - cooldown)) / cooldown, 0, 1), peak, final
    ),
  }
  decay = decays[opt.decay_type]

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    warm = init + (peak - init) * step / max(warmup_steps, 1)
    return jnp.where(step < warmup_steps, warm, decay(step))

  return schedule


def rho(opt: Any) -> float | Schedule:
  """The radius over time, or the float it always is.

  `warmup` rises linearly from 0; `lr` is proportional to the learning rate; `piecewise` multiplies
  by the last of `rho_pieces` ("fraction:factor,...") whose fraction of training has passed, and by
  0 before the first. `late` and `mid` are such pieces by name (PHASES).
  """
  radius = float(opt.rho)
  if opt.rho_schedule == "constant" or radius == 0:
    return radius
  if opt.rho_schedule == "warmup":
    warmup_steps = max(opt.rho_warmup_steps, 1)
    return lambda step: radius * jnp.clip(jnp.asarray(step, jnp.float32) / warmup_steps, 0, 1)
  if opt.rho_schedule == "lr":
    rate, peak = learning_rate(opt), opt.peak_learning_rate
    return lambda step: radius * (rate(step) / peak)
  parsed = parse_pieces(PHASES.get(opt.rho_schedule, opt.rho_pieces))
  starts = jnp.asarray([round(fraction * opt.num_train_steps) for fraction, _ in parsed])
  factors = jnp.asarray([0.0, *(factor for _, factor in parsed)], jnp.float32)
  return lambda step: radius * factors[jnp.sum(jnp.asarray(step) >= starts)]


def parse_pieces(text: str) -> list[tuple[float, float]]:
  """ "0.8:1" -> [(0.8, 1.0)]; ValueError if it is not of that form, in rising order."""
  pieces = [tuple(map(float, piece.split(":"))) for piece in text.split(",")]
  good = all(len(p) == 2 and 0 <= p[0] <= 1 and p[1] >= 0 for p in pieces)
  if not good or pieces != sorted(pieces):
    raise ValueError("write fraction:factor,fraction:factor with rising fractions in [0, 1]")
  return [(p[0], p[1]) for p in pieces]
