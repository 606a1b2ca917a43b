"""What the methods ask of a model: a loss that factors through outputs, loss(theta) = L(F(theta)).

A gradient is J^T r, the Jacobian of the outputs applied to the residual r = dL/doutputs. A method
takes J and r from theta or from a perturbed theta', so an objective gives both apart: its outputs,
which are differentiated here, and the pull of any mix of residuals through the outputs at a point.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

Params = Any
Batch = Any  # a pytree whose arrays share a leading axis of examples
Outputs = Any  # whatever `Objective.outputs` returns
Residual = Any  # whatever `Objective.pull` stores of a residual


class Source(NamedTuple):
  """Where a residual comes from: computed at these outputs, or stored by an earlier pass."""

  outputs: Outputs | None = None
  residual: Residual | None = None


class Pulled(NamedTuple):
  losses: tuple[Any, ...]  # at each source's outputs, aux included; None for a stored residual
  cotangent: Outputs  # of the outputs: what the backward pass starts from
  residual: Residual | None  # the mix itself, if it is to be stored


class Objective(Protocol):
  """Losses and residuals are those of a weighted mean over the whole batch: those of microbatches
  add up to it."""

  def outputs(self, params: Params, batch: Batch, *, perturbed: bool = False) -> Outputs:
    """The forward pass; `perturbed` says that it is the one at theta'."""

  def pull(
    self,
    sources: Sequence[tuple[float, Source]],
    at: Outputs,
    batch: Batch,
    total: jax.Array,
    *,
    store: bool = False,
  ) -> Pulled:
    """sum_i c_i r(source_i) on `batch`, of total weight `total`, as a cotangent of `at`."""

  def second_derivative(
    self, at: Outputs, speed: Outputs, acceleration: Outputs, batch: Batch, total: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Of the loss, as the outputs move: by the curvature of L, and by the outputs' own."""

  def example_losses(self, at: Outputs, batch: Batch) -> jax.Array:
    """The loss of each example by itself, [B]."""

  def weight(self, batch: Batch) -> jax.Array:
    """How much a batch counts in a mean over several."""

  def stores_residual(self, params: Params, batch: Batch) -> bool:
    """Whether the first pass stores residuals for the second, or outputs to make them again."""

  def save(self, outputs: Outputs) -> Any:
    """What must be stored of the outputs; parameters need not be."""

  def load(self, params: Params, saved: Any) -> Outputs:
    """The outputs again, with the parameters they came from."""

  def microbatches(self, batch: Batch, parts: int) -> Batch:
    """[B, ...] to [parts, B / parts, ...]."""

  def like_parameters(self, gradient: Params) -> Params:
    """Constrains a gradient to the parameters' layout over devices."""


def interleaved(batch: Batch, parts: int) -> Batch:
  """Every `parts`-th example to one part, so that none has to leave its device."""
  return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)


class Dense:
  """The objective of two plain functions: outputs(params, batch), and loss(outputs, batch), a mean.

  `weight(batch)` says how much a microbatch counts in that mean: by default, its examples. With
  `has_aux`, `loss` returns (loss, aux), and aux values are averaged as the loss is.
  """

  def __init__(
    self,
    outputs: Callable[[Params, Batch], Outputs],
    loss: Callable[[Outputs, Batch], jax.Array],
    weight: Callable[[Batch], jax.Array] | None = None,
    has_aux: bool = False,
  ):
    self._outputs, self._loss, self._weight, self._has_aux = outputs, loss, weight, has_aux

  def outputs(self, params: Params, batch: Batch, *, perturbed: bool = False) -> Outputs:
    return self._outputs(params, batch)

  def pull(
    self,
    sources: Sequence[tuple[float, Source]],
    at: Outputs,
    batch: Batch,
    total: jax.Array,
    *,
    store: bool = False,
  ) -> Pulled:
    share = self.weight(batch) / total
    losses: list[jax.Array | None] = []
    mix = jax.tree.map(jnp.zeros_like, at)
    for c, source in sources:
      loss, residual = None, source.residual
      if residual is None:
        measured = jax.value_and_grad(self._loss, has_aux=self._has_aux)(source.outputs, batch)
        # Where nothing counts, a mean is 0 / 0.
        loss, residual = jax.tree.map(lambda x: jnp.where(share > 0, share * x, 0), measured)
      losses.append(loss)
      mix = jax.tree.map(lambda m, r, c=c: m + c * r, mix, residual)
    return Pulled(tuple(losses), mix, mix if store else None)

  def second_derivative(
    self, at: Outputs, speed: Outputs, acceleration: Outputs, batch: Batch, total: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    share = self.weight(batch) / total
    gradient = jax.grad(lambda z: self.loss(z, batch))
    residual, change = jax.jvp(gradient, (at,), (speed,))
    return share * optax.tree.vdot(change, speed), share * optax.tree.vdot(residual, acceleration)

  def loss(self, outputs: Outputs, batch: Batch) -> jax.Array:
    value = self._loss(outputs, batch)
    return value[0] if self._has_aux else value

  def example_losses(self, at: Outputs, batch: Batch) -> jax.Array:
    def one(z: Outputs, example: Batch) -> jax.Array:
      return self.loss(*jax.tree.map(lambda x: x[None], (z, example)))

    return jax.vmap(one)(at, batch)

  def weight(self, batch: Batch) -> jax.Array:
    if self._weight:
      return self._weight(batch)
    shape = jnp.shape(jax.tree.leaves(batch)[0])
    return jnp.float32(shape[0] if shape else 1)

  def stores_residual(self, params: Params, batch: Batch) -> bool:
    return True

  def save(self, outputs: Outputs) -> Any:
    return outputs

  def load(self, params: Params, saved: Any) -> Outputs:
    return saved

  def microbatches(self, batch: Batch, parts: int) -> Batch:
    if parts == 1:  # whatever is in it: moments of the data, say, have no axis of examples
      return jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
    return interleaved(batch, parts)

  def like_parameters(self, gradient: Params) -> Params:
    return gradient
