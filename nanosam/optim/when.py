"""When a step has a second pass, and what a row remembers of it for the steps that have none.

What is remembered is a pytree that lives in the train state beside the optimizer's: sharded as the
parameters are, saved with them, left alone by a step that the guard rejects.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanosam.optim.direction import Moments
from nanosam.optim.objective import Params

Memory = Any


def _nothing(params: Params) -> Memory:
  return ()


def _same(gradient: Params, memory: Memory) -> Memory:
  return memory


def _plain(g: Params, memory: Memory, opt: Any) -> tuple[Params, Memory]:
  return g, memory


class When(NamedTuple):
  """The third column of the table; by default every step has a second pass."""

  # Whether this step has one, by the gradient at theta and the updates so far; None: always.
  due: Callable[[Params, Memory, Moments, Any], tuple[jax.Array, Memory]] | None = None
  init: Callable[[Params], Memory] = _nothing
  remember: Callable[[Params, Memory], Memory] = _same  # of the row's gradient
  holds_gradient: bool = False  # g takes the memory's place during a second pass
  instead: Callable[[Params, Memory, Any], tuple[Params, Memory]] = _plain  # of a second pass
  share: float = 1.0  # of the steps that have one, where that is known beforehand
  needs_count: bool = False  # of the updates made

  @property
  def remembers(self) -> bool:
    return self.init is not _nothing


always = When()


def every(opt: Any) -> When:
  """Steps 0, k, 2k, ...; the others are plain. A step that the guard rejects does not count."""
  k = opt.every
  if k == 1:
    return always

  def due(g: Params, memory: Memory, moments: Moments, opt: Any) -> tuple[jax.Array, Memory]:
    return jnp.asarray(moments.updates) % k == 0, memory

  return When(due, share=1 / k, needs_count=True)


def look(opt: Any) -> When:
  """LookSAM (Liu et al., CVPR 2022; arXiv 2203.02714): steps 0, k, 2k, ... are the row's own.

  They store v, the part of the row's gradient that is orthogonal to g. The steps in between use
  g + alpha |g| v/|v|. With alpha 0, v stays as long relative to g as it was when it was measured.
  """
  periodic = every(opt)
  if periodic is always:
    return always

  def init(params: Params) -> Memory:
    return jax.tree.map(jnp.zeros_like, params)

  def remember(gradient: Params, g: Memory) -> Memory:
    square = optax.tree.norm(g, squared=True)
    square = jnp.where(square > 0, square, 1)
    along = optax.tree.vdot(g, gradient) / square
    v = jax.tree.map(lambda x, y: (y - along * x) / jnp.sqrt(square), g, gradient)
    usable = jnp.isfinite(optax.tree.norm(v))  # the guard may put g in the place of a bad gradient
    return jax.tree.map(lambda x: jnp.where(usable, x, 0), v)

  def instead(g: Params, memory: Memory, opt: Any) -> tuple[Params, Memory]:
    scale, length = optax.tree.norm(g), optax.tree.norm(memory)
    if opt.look_alpha:
      scale = opt.look_alpha * scale / jnp.where(length > 0, length, 1)
    return jax.tree.map(lambda x, v: x + scale * v, g, memory), memory

  return periodic._replace(init=init, remember=remember, instead=instead, holds_gradient=True)


class NormStatistics(NamedTuple):
  """Running mean and variance of |g|^2."""

  mean: jax.Array
  variance: jax.Array


def _sharp(
  g: Params, memory: NormStatistics, moments: Moments, opt: Any
) -> tuple[jax.Array, NormStatistics]:
  square, keep = optax.tree.norm(g, squared=True), opt.ae_decay
  mean = keep * memory.mean + (1 - keep) * square
  variance = keep * memory.variance + (1 - keep) * (square - mean) ** 2
  progress = jnp.asarray(moments.updates) / opt.num_train_steps
  threshold = opt.ae_start + (opt.ae_end - opt.ae_start) * progress
  return square >= mean + threshold * jnp.sqrt(variance), NormStatistics(mean, variance)


# AE-SAM (Jiang et al., ICLR 2023; arXiv 2304.14647): where |g|^2 is large among those so far, by a
# threshold in standard deviations that moves linearly over training.
adaptive = When(
  _sharp,
  init=lambda params: NormStatistics(jnp.zeros(()), jnp.exp(jnp.float32(-10))),
  needs_count=True,
)

# The last gradient that went to the base optimizer: of the direction `last`.
last = When(
  init=lambda params: jax.tree.map(jnp.zeros_like, params),
  remember=lambda gradient, memory: gradient,
  instead=lambda g, memory, opt: (g, g),
)
