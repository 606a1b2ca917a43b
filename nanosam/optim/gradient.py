"""The gradient that a method hands to the base optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanosam import head
from nanosam.data.batch import Batch
from nanosam.model import Params, unembedding
from nanosam.optim.registry import Method
from nanosam.sharding import split_like_parameters, split_over_batch


class Net(NamedTuple):
  """A model as the methods see it."""

  hidden: Callable[[Params, Batch], jax.Array]  # last hidden states, B x L x D
  chunk: int  # of the head


def visit(
  net: Net, params: Params, batch: Batch
) -> tuple[head.Point, Callable[[head.Point], Params]]:
  """One forward pass: what the head needs, and the way back to the parameters.

  A tied embedding is both read by the body and handed to the head, so the way back adds its two
  gradients.
  """
  point, back = jax.vjp(lambda p: head.Point(net.hidden(p, batch), unembedding(p)), params)
  return point, lambda gradient: split_like_parameters(back(gradient)[0])


def targets(batch: Batch, total_weight: jax.Array) -> head.Targets:
  return head.Targets(batch.targets_BxL, batch.weights_BxL / total_weight)


def estimate(
  method: Method, net: Net, params: Params, batch: Batch, microbatches: int
) -> tuple[jax.Array, Params]:
  """Loss at the parameters and the gradient by `method`, over the whole batch."""
  total_weight = jnp.maximum(jnp.sum(batch.weights_BxL), 1)

  def one(micro: Batch) -> tuple[jax.Array, Params]:
    here, back = visit(net, params, micro)
    out = head.vjp([(1.0, here)], here, targets(micro, total_weight), chunk=net.chunk)
    return out.losses[0], back(out.gradient)

  return accumulate(one, batch, microbatches)


def accumulate(one: Callable[[Batch], Any], batch: Batch, microbatches: int) -> Any:
  """Sums `one` over microbatches: exact, since weights are divided by the whole batch's total."""
  if microbatches == 1:
    return one(batch)
  micro = jax.tree.map(lambda x: _interleaved(x, microbatches), batch)
  first = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micro))
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

  def add(total, m):
    return jax.tree.map(jnp.add, total, one(m)), None

  return jax.lax.scan(add, zero, micro)[0]


def _interleaved(x_B: jax.Array, microbatches: int) -> jax.Array:
  """[B, ...] to [K, B/K, ...] with every K-th row in a microbatch: no row changes its device."""
  return split_over_batch(jnp.moveaxis(x_B.reshape(-1, microbatches, *x_B.shape[1:]), 1, 0), axis=1)
