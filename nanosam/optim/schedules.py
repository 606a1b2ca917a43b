"""Learning-rate schedules: a linear warmup, then one of several ways down."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]


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


DECAY_TYPES = ("cosine", "linear", "rsqrt", "constant", "wsd")
