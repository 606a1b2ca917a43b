"""Passes over one batch: at theta, and along a path from theta to theta' = theta + eps.

Each pass runs over all microbatches and adds up. What the second pass needs of the first is saved:
outputs, or the residual itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanosam.optim.methods import HERE, THERE, Path
from nanosam.optim.objective import Batch, Objective, Outputs, Params, Source

Backward = Callable[[Outputs], Params]


class Saved(NamedTuple):
  """Of a microbatch, from the first pass to the second: one of the two, or nothing."""

  outputs: Any = None  # as Objective.save leaves them
  residual: Any = None


class Site(NamedTuple):
  """What a pass knows of theta, or of theta'."""

  source: Source
  backward: Backward | None = None  # the way back, if this pass went there


@dataclasses.dataclass(frozen=True)
class Passes:
  objective: Objective
  params: Params
  batch: Batch
  microbatches: int = 1

  def first(self, path: Path | None = None) -> tuple[jax.Array, Params, Saved]:
    """Loss and gradient at theta, and what a second pass along `path` will need."""
    reuse = path is not None and path.reuses_residual()
    save = reuse or (path is not None and path.selects)
    store = reuse and self.objective.stores_residual(self.params, self.batch)
    total = self.total_weight()

    def one(micro: Batch) -> tuple[Any, Saved]:
      loss, gradient, source = self._gradient_at(self.params, micro, total, store)
      outputs = self.objective.save(source.outputs) if save and not store else None
      return (loss, gradient), Saved(outputs, source.residual)

    (loss, gradient), saved = accumulate(one, self.micros(), self.microbatches)
    return loss, gradient, saved

  def ascent(self, path: Path, parts: int) -> tuple[jax.Array | None, Params, Saved]:
    """The gradient of every `parts`-th example, and what a second pass over all of them will need.

    The others have no backward pass, and no forward pass either if nothing is needed of them. The
    loss is that of all, None if not all of it was computed. Microbatches are a multiple of `parts`.
    """
    save, total = path.reuses_residual(), self.total_weight()
    store = save and self.objective.stores_residual(self.params, self.batch)

    def forward(micro: Batch) -> tuple[Any, Saved]:
      outputs = self.objective.outputs(self.params, micro)
      if not store:
        return (), Saved(self.objective.save(outputs))
      pulled = self.objective.pull([(1.0, Source(outputs))], outputs, micro, total, store=True)
      return pulled.losses[0], Saved(residual=pulled.residual)

    def one(group: Batch) -> tuple[Any, Any]:
      micro, others = (jax.tree.map(lambda x, i=i: x[i], group) for i in (0, slice(1, None)))
      loss, gradient, source = self._gradient_at(self.params, micro, total, store)
      sums = (gradient, self.objective.weight(micro))
      if not save:
        return ((), *sums), Saved()
      saved = Saved(None if store else self.objective.save(source.outputs), source.residual)
      other_losses, rest = accumulate(forward, others, parts - 1)
      saved = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), saved, rest)
      return (jax.tree.map(jnp.add, loss, other_losses) if store else (), *sums), saved

    groups = self.microbatches // parts
    xs = jax.tree.map(lambda x: x.reshape(groups, parts, *x.shape[1:]), self.micros())
    (loss, gradient, weight), saved = accumulate(one, xs, groups)
    saved = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), saved)
    scale = total / jnp.where(weight > 0, weight, 1)  # to the mean over these examples alone
    return loss if store else None, jax.tree.map(lambda x: scale * x, gradient), saved

  def sharpest(self, eps: Params, saved: Saved, share: float) -> "Passes":
    """Passes over the share of the examples whose loss rises most from theta to theta + eps."""
    theta = jax.tree.map(jnp.add, self.params, eps)

    def one(x: tuple[Batch, Saved]) -> tuple[tuple[()], jax.Array]:
      micro, saved = x
      after = self.objective.outputs(theta, micro, perturbed=True)
      before = self.objective.load(self.params, saved.outputs)
      losses = (self.objective.example_losses(at, micro) for at in (after, before))
      return (), jnp.subtract(*losses)

    _, rise_mxb = accumulate(one, (self.micros(), saved), self.microbatches)
    rise_B = rise_mxb.T.reshape(-1)  # as they lie in the batch
    _, rows = jax.lax.top_k(rise_B, round(share * rise_B.size))
    chosen = jax.tree.map(lambda x: x[jnp.sort(rows)], self.batch)
    return dataclasses.replace(self, batch=chosen)

  def second(
    self, path: Path, eps: Params, saved: Saved, theta: Params | None = None
  ) -> tuple[Params, dict[str, jax.Array]]:
    """The path's terms, summed, and the losses met on the way, by site; `theta` is theta'."""
    # Once for all microbatches: nothing else of the perturbation has to live beside them.
    if theta is None and path.uses(THERE):
      theta = jax.tree.map(jnp.add, self.params, eps)
    total = self.total_weight()

    def one(x: tuple[Batch, Saved]) -> tuple[Any, None]:
      micro, saved = x
      if path.derivative:
        return (self._derivative(eps, micro, total), {}), None
      sites = {}
      if theta is not None:
        sites[THERE] = self._forward(theta, micro, perturbed=True)
      if path.uses(HERE):
        sites[HERE] = self._here(path, micro, saved)
      return self._backward(path, sites, micro, total), None

    return accumulate(one, (self.micros(), saved), self.microbatches)[0]

  def micros(self) -> Batch:
    return self.objective.microbatches(self.batch, self.microbatches)

  def total_weight(self) -> jax.Array:
    """What the microbatches' weights are divided by; 1 if nothing in the batch counts."""
    weight = self.objective.weight(self.batch)
    return jnp.where(weight > 0, weight, 1)

  def _forward(self, params: Params, micro: Batch, *, perturbed: bool = False) -> Site:
    outputs, vjp = jax.vjp(lambda p: self.objective.outputs(p, micro, perturbed=perturbed), params)
    return Site(Source(outputs), lambda ct: self.objective.like_parameters(vjp(ct)[0]))

  def _gradient_at(
    self, params: Params, micro: Batch, total: jax.Array, store: bool = False
  ) -> tuple[jax.Array, Params, Source]:
    source, backward = self._forward(params, micro)
    assert backward is not None
    pulled = self.objective.pull([(1.0, source)], source.outputs, micro, total, store=store)
    (loss,) = pulled.losses
    assert loss is not None
    return loss, backward(pulled.cotangent), Source(source.outputs, pulled.residual)

  def _derivative(self, eps: Params, micro: Batch, total: jax.Array) -> Params:
    """The Hessian times eps."""
    return jax.jvp(lambda p: self._gradient_at(p, micro, total)[1], (self.params,), (eps,))[1]

  def _here(self, path: Path, micro: Batch, saved: Saved) -> Site:
    """theta again: from what was saved, or by another forward pass if its Jacobian is wanted."""
    if any(term.jacobian == HERE for term in path.terms):
      source, backward = self._forward(self.params, micro)
      return Site(Source(source.outputs, saved.residual), backward)
    if saved.residual is not None:
      return Site(Source(residual=saved.residual))
    if saved.outputs is None:  # there was no first pass
      return Site(Source(self.objective.outputs(self.params, micro)))
    return Site(Source(self.objective.load(self.params, saved.outputs)))

  def _backward(
    self, path: Path, sites: dict[str, Site], micro: Batch, total: jax.Array
  ) -> tuple[Params, dict[str, jax.Array]]:
    gradient: Params | None = None
    losses: dict[str, jax.Array] = {}
    for term in path.terms:
      at = sites[term.jacobian]
      assert at.backward is not None
      sources = [(c, sites[site].source) for c, site in term.residual]
      pulled = self.objective.pull(sources, at.source.outputs, micro, total)
      for (_, site), loss in zip(term.residual, pulled.losses, strict=True):
        if loss is not None:
          losses[site] = loss
      part = at.backward(pulled.cotangent)
      part = jax.tree.map(lambda g, p: g.astype(p.dtype), part, self.params)
      gradient = part if gradient is None else jax.tree.map(jnp.add, gradient, part)
    return gradient, losses


def accumulate(one: Callable[[Any], tuple[Any, Any]], xs: Any, parts: int) -> tuple[Any, Any]:
  """Sums what `one` returns first over the parts, and stacks what it returns second."""
  first = jax.tree.map(lambda x: x[0], xs)
  if parts == 1:
    total, stacked = one(first)
    return total, jax.tree.map(lambda x: x[None], stacked)
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first)[0])

  def add(total, x):
    part, rest = one(x)
    return jax.tree.map(jnp.add, total, part), rest

  return jax.lax.scan(add, zero, xs)
