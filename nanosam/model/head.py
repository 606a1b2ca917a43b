"""The unembedding, in chunks along the sequence: loss, residual, and the way back.

Logits S = h W^T; loss = sum_t w_t (logsumexp(S_t) - S_t[y_t]); residual R = dloss/dS =
w (softmax(S) - onehot). The way back through S = h W^T is two products, dh = R W and dW = R^T h,
and the functional methods need them with R from one point and (h, W) from another. So the head is
not differentiated: `vjp` is written out, for any residual at any point. These are plain functions
of arrays: differentiating *through* them (curvature, penalties) works as usual.

Only one chunk's logits exist at a time: no buffer of B x L x V, unless a residual is to be kept.
Weights arrive divided by the batch's total: sums over chunks, microbatches and devices are exact.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanosam.model.sharding import (
  batch_shards,
  gathered,
  split_of,
  split_over_batch,
  sum_of_shards,
)


class Point(NamedTuple):
  """What the head sees of the parameters: last hidden states and the unembedding matrix."""

  h_BxLxD: jax.Array
  W_VxD: jax.Array


class Targets(NamedTuple):
  ids_BxL: jax.Array
  weights_BxL: jax.Array


class Stored(NamedTuple):
  """A residual kept from an earlier pass: B x L x V elements, by explicit choice."""

  R_nxBxCxV: jax.Array


class Pullback(NamedTuple):
  losses: tuple[jax.Array, ...]  # one for each source that is a Point
  gradient: Point
  residual: Stored | None


def vjp(
  sources: Sequence[tuple[float | jax.Array, Point | Stored]],
  at: Point,
  targets: Targets,
  *,
  chunk: int,
  keep: bool = False,
) -> Pullback:
  """The residual sum_i c_i r(source_i), pulled back through the head at `at`."""
  (V, D), L = at.W_VxD.shape, at.h_BxLxD.shape[1]
  split = split_of(at.W_VxD.shape)
  padding = split.padding if split else 0
  dtype = at.h_BxLxD.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  size = _size(chunk, L)
  W_VxD = gathered(at.W_VxD, dtype)
  source_W = [
    gathered(s.W_VxD, s.h_BxLxD.dtype) if isinstance(s, Point) else None for _, s in sources
  ]

  def one_chunk(dW_GxVxD, xs):
    source_xs, h_BxCxD, ids_BxC, w_BxC = xs
    R_BxCxV, losses = jnp.zeros((), wide), []
    for (c, _), W, x in zip(sources, source_W, source_xs, strict=True):
      if W is None:
        r_BxCxV = x.astype(wide)
      else:
        nll_BxC, r_BxCxV = _loss_and_residual(x, W, ids_BxC)
        r_BxCxV *= w_BxC[..., None]
        losses.append(jnp.sum(w_BxC * nll_BxC))
      R_BxCxV += c * r_BxCxV
    R_BxCxV = R_BxCxV.astype(dtype)
    dh_BxCxD = jnp.einsum("bcv,vd->bcd", R_BxCxV, W_VxD)
    R_GxTxV = _per_shard(R_BxCxV)
    if padding:
      R_GxTxV = jnp.pad(R_GxTxV, ((0, 0), (0, 0), (0, padding)))
    dW_GxVxD += jnp.einsum(
      "gtv,gtd->gvd", R_GxTxV, _per_shard(h_BxCxD), preferred_element_type=wide
    )
    return dW_GxVxD, (dh_BxCxD, tuple(losses), R_BxCxV if keep else None)

  xs = (
    [_chunks(s.h_BxLxD, size) if isinstance(s, Point) else s.R_nxBxCxV for _, s in sources],
    *(_chunks(x, size) for x in (at.h_BxLxD, targets.ids_BxL, targets.weights_BxL)),
  )
  # One partial sum per shard of the batch: a single reduction after the loop, not one per chunk.
  zero_GxVxD = split_over_batch(jnp.zeros((batch_shards(), V + padding, D), wide))
  dW_GxVxD, (dh, losses, R) = jax.lax.scan(one_chunk, zero_GxVxD, xs)
  dW_VxD = sum_of_shards(dW_GxVxD, split)[:V] if split else jnp.sum(dW_GxVxD, 0)
  gradient = Point(_whole(dh, L), dW_VxD.astype(at.W_VxD.dtype))
  return Pullback(tuple(map(jnp.sum, losses)), gradient, Stored(R) if keep else None)


def token_losses(point: Point, ids_BxL: jax.Array, *, chunk: int) -> jax.Array:
  """Negative log-likelihood of each target, unweighted."""
  return _by_target(lambda logits, ids: _loss(logits, ids)[0], point, ids_BxL, chunk)


def correct(point: Point, ids_BxL: jax.Array, *, chunk: int) -> jax.Array:
  """Whether each target has the largest logit; among equals the first class counts."""
  return _by_target(lambda logits, ids: jnp.argmax(logits, -1) == ids, point, ids_BxL, chunk)


def _by_target(
  of: Callable[[jax.Array, jax.Array], jax.Array], point: Point, ids_BxL: jax.Array, chunk: int
) -> jax.Array:
  """`of` the logits and targets of each chunk, B x L."""
  L = ids_BxL.shape[1]
  size = _size(chunk, L)
  W_VxD = gathered(point.W_VxD, point.h_BxLxD.dtype)

  def one_chunk(xs):
    h_BxCxD, ids_BxC = xs
    return of(_logits(h_BxCxD, W_VxD), ids_BxC)

  return _whole(jax.lax.map(one_chunk, (_chunks(point.h_BxLxD, size), _chunks(ids_BxL, size))), L)


def second_derivative(
  point: Point, speed: Point, acceleration: Point, targets: Targets, *, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """Of the loss, as the point moves, in two parts.

  With p the softmax of the logits and S', S'' their derivatives: sum_t w_t Var_p(S'_t), from the
  curvature of the loss in the logits; and <R, S''>, from that of the logits themselves.
  """
  L = point.h_BxLxD.shape[1]
  size, dtype = _size(chunk, L), point.h_BxLxD.dtype
  W, dW, ddW = (gathered(x.W_VxD, dtype) for x in (point, speed, acceleration))

  def one_chunk(xs):
    h, dh, ddh, ids_BxC, w_BxC = xs
    p_BxCxV = jax.nn.softmax(_logits(h, W))
    dS_BxCxV = _logits(dh, W) + _logits(h, dW)
    ddS_BxCxV = _logits(ddh, W) + 2 * _logits(dh, dW) + _logits(h, ddW)
    mean_BxCx1 = jnp.sum(p_BxCxV * dS_BxCxV, -1, keepdims=True)
    by_loss_BxC = jnp.sum(p_BxCxV * (dS_BxCxV - mean_BxCx1) ** 2, -1)
    target_BxC = jnp.take_along_axis(ddS_BxCxV, ids_BxC[..., None], axis=-1)[..., 0]
    by_logits_BxC = jnp.sum(p_BxCxV * ddS_BxCxV, -1) - target_BxC
    return jnp.sum(w_BxC * by_loss_BxC), jnp.sum(w_BxC * by_logits_BxC)

  hs = (x.h_BxLxD for x in (point, speed, acceleration))
  chunks = tuple(_chunks(x, size) for x in (*hs, targets.ids_BxL, targets.weights_BxL))
  by_loss_n, by_logits_n = jax.lax.map(one_chunk, chunks)
  return jnp.sum(by_loss_n), jnp.sum(by_logits_n)


def _logits(h_BxCxD: jax.Array, W_VxD: jax.Array) -> jax.Array:
  wide = jnp.promote_types(h_BxCxD.dtype, jnp.float32)
  return jnp.einsum("bcd,vd->bcv", h_BxCxD, W_VxD, preferred_element_type=wide)


def _loss(S_BxCxV: jax.Array, ids_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
  lse_BxC = jax.nn.logsumexp(S_BxCxV, axis=-1)
  target_BxC = jnp.take_along_axis(S_BxCxV, ids_BxC[..., None], axis=-1)[..., 0]
  return lse_BxC - target_BxC, lse_BxC


def _loss_and_residual(h_BxCxD, W_VxD, ids_BxC) -> tuple[jax.Array, jax.Array]:
  S_BxCxV = _logits(h_BxCxD, W_VxD)
  nll_BxC, lse_BxC = _loss(S_BxCxV, ids_BxC)
  onehot_BxCxV = jax.nn.one_hot(ids_BxC, S_BxCxV.shape[-1], dtype=S_BxCxV.dtype)
  return nll_BxC, jnp.exp(S_BxCxV - lse_BxC[..., None]) - onehot_BxCxV


def _size(chunk: int, L: int) -> int:
  return L if chunk == 0 else min(chunk, L)  # 0: the dense form, all logits at once


def _chunks(x_BxL: jax.Array, size: int) -> jax.Array:
  """[B, L, ...] to [n, B, C, ...]; what is padded has weight zero and changes nothing."""
  B, L = x_BxL.shape[:2]
  n = -(-L // size)
  pad = [(0, 0), (0, n * size - L)] + [(0, 0)] * (x_BxL.ndim - 2)
  return jnp.moveaxis(jnp.pad(x_BxL, pad).reshape(B, n, size, *x_BxL.shape[2:]), 1, 0)


def _whole(x_nxBxC: jax.Array, L: int) -> jax.Array:
  n, B, C = x_nxBxC.shape[:3]
  return jnp.moveaxis(x_nxBxC, 0, 1).reshape(B, n * C, *x_nxBxC.shape[3:])[:, :L]


def _per_shard(x_BxC: jax.Array) -> jax.Array:
  """[B, C, ...] to [G, B/G * C, ...]: what each shard of the batch holds, as an axis."""
  return split_over_batch(x_BxC.reshape(batch_shards(), -1, x_BxC.shape[-1]))
