"""Passes over one global batch: at theta, and along a path from theta to theta' = theta + eps.

Each pass runs over all microbatches and adds up; weights are divided by the whole batch's total, so
the sums are exact. What the second pass needs of the first is kept: last hidden states, or the
residual itself.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanosam.data.batch import Batch
from nanosam.model import head
from nanosam.model.sharding import batch_shards, split_like_parameters, split_over_batch
from nanosam.model.transformer import Params, unembedding
from nanosam.optim.methods import HERE, THERE, Path

STORE_LIMIT_BYTES = 2**27  # head.residual=auto keeps a residual up to this size on each device

Hidden = Callable[[Params, Batch], jax.Array]  # to last hidden states, B x L x D
Back = Callable[[head.Point], Params]


class Net(NamedTuple):
  """A model as the methods see it."""

  hidden: Hidden
  hidden_perturbed: Hidden  # the same, in the compute type of the second pass
  chunk: int  # of the head
  residual: str  # store | recompute | auto


class Kept(NamedTuple):
  """Of a microbatch, from the first pass to the second: one of the two, or nothing."""

  h_BxLxD: jax.Array | None = None
  residual: head.Stored | None = None


class Site(NamedTuple):
  """What a pass knows of theta, or of theta'."""

  point: head.Point | None
  back: Back | None = None
  residual: head.Stored | None = None

  def source(self) -> head.Point | head.Stored:
    source = self.residual or self.point
    assert source is not None
    return source


def visit(hidden: Hidden, params: Params, batch: Batch) -> tuple[head.Point, Back]:
  """One forward pass: what the head needs, and the way back to the parameters.

  A tied embedding is both read by the body and handed to the head: the way back adds its two
  gradients.
  """
  point, back = jax.vjp(lambda p: head.Point(hidden(p, batch), unembedding(p)), params)
  return point, lambda gradient: split_like_parameters(back(gradient)[0])


@dataclasses.dataclass(frozen=True)
class Passes:
  net: Net
  params: Params
  batch: Batch
  microbatches: int = 1

  def plain(self, path: Path | None = None) -> tuple[jax.Array, Params, Kept]:
    """Loss and gradient at theta, and what a second pass along `path` will need."""
    keep = self._keep(path) if path else "nothing"

    def one(micro: Batch):
      loss, gradient, site = self._gradient_at(self.params, micro, keep == "residual")
      return (loss, gradient), Kept(site.point.h_BxLxD if keep == "hidden" else None, site.residual)

    (loss, gradient), kept = accumulate(one, self.micros(), self.microbatches)
    return loss, gradient, kept

  def along(self, path: Path, eps: Params, kept: Kept) -> tuple[Params, dict[str, jax.Array]]:
    """The path's terms, summed, and the losses met on the way, by site."""
    # Once for all microbatches: nothing else of the perturbation has to live beside them.
    theta = jax.tree.map(jnp.add, self.params, eps) if path.uses(THERE) else None

    def one(x: tuple[Batch, Kept]):
      micro, kept = x
      if path.derivative:
        return (self._derivative(eps, micro), {}), None
      sites = {}
      if theta is not None:
        sites[THERE] = Site(*visit(self.net.hidden_perturbed, theta, micro))
      if path.uses(HERE):
        sites[HERE] = self._here(path, micro, kept)
      return self._follow(path, sites, micro), None

    return accumulate(one, (self.micros(), kept), self.microbatches)[0]

  def _gradient_at(self, params: Params, micro: Batch, keep: bool = False):
    point, back = visit(self.net.hidden, params, micro)
    out = head.vjp([(1.0, point)], point, self.targets(micro), chunk=self.net.chunk, keep=keep)
    return out.losses[0], back(out.gradient), Site(point, residual=out.residual)

  def _derivative(self, eps: Params, micro: Batch) -> Params:
    """The Hessian times eps."""
    return jax.jvp(lambda p: self._gradient_at(p, micro)[1], (self.params,), (eps,))[1]

  def _here(self, path: Path, micro: Batch, kept: Kept) -> Site:
    """theta again: from what was kept, or by another visit if the Jacobian is wanted there."""
    if any(term.jacobian == HERE for term in path.terms):
      return Site(*visit(self.net.hidden, self.params, micro), kept.residual)
    if kept.residual:
      return Site(None, residual=kept.residual)
    h_BxLxD = self.net.hidden(self.params, micro) if kept.h_BxLxD is None else kept.h_BxLxD
    return Site(head.Point(h_BxLxD, unembedding(self.params)))

  def _follow(self, path: Path, sites: dict[str, Site], micro: Batch):
    total: Params | None = None
    losses: dict[str, jax.Array] = {}
    for term in path.terms:
      at = sites[term.jacobian]
      assert at.point is not None and at.back is not None
      sources = [(c, sites[site].source()) for c, site in term.residual]
      out = head.vjp(sources, at.point, self.targets(micro), chunk=self.net.chunk)
      fresh = [site for _, site in term.residual if sites[site].residual is None]
      losses |= dict(zip(fresh, out.losses, strict=True))
      gradient = at.back(out.gradient)
      gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, self.params)
      total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
    return total, losses

  def targets(self, micro: Batch) -> head.Targets:
    total_weight = jnp.maximum(jnp.sum(self.batch.weights_BxL), 1)
    return head.Targets(micro.targets_BxL, micro.weights_BxL / total_weight)

  def _keep(self, path: Path) -> str:
    """What the first pass leaves to the second: a residual costs memory, hidden states a matmul."""
    if not any(site == HERE for term in path.terms for _, site in term.residual):
      return "nothing"
    size = math.prod(self.batch.inputs_BxL.shape) * unembedding(self.params).shape[0]
    dtype = jax.eval_shape(self.net.hidden, self.params, self.batch).dtype
    fits = size * dtype.itemsize / batch_shards() <= STORE_LIMIT_BYTES
    store = self.net.residual == "store" or (self.net.residual == "auto" and fits)
    return "residual" if store else "hidden"

  def micros(self) -> Batch:
    return interleaved(self.batch, self.microbatches)


def interleaved(batch: Batch, parts: int) -> Batch:
  """[B, ...] to [K, B/K, ...], every K-th row to a part: no row leaves its device."""

  def leaf(x_B: jax.Array) -> jax.Array:
    return split_over_batch(jnp.moveaxis(x_B.reshape(-1, parts, *x_B.shape[1:]), 1, 0), axis=1)

  return jax.tree.map(leaf, batch)


def accumulate(one: Callable[[Any], tuple[Any, Any]], xs: Any, parts: int) -> tuple[Any, Any]:
  """Sums what `one` returns first over the parts, and stacks what it returns second."""
  first = jax.tree.map(lambda x: x[0], xs)
  if parts == 1:
    total, kept = one(first)
    return total, jax.tree.map(lambda x: x[None], kept)
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first)[0])

  def add(total, x):
    part, kept = one(x)
    return jax.tree.map(jnp.add, total, part), kept

  return jax.lax.scan(add, zero, xs)
