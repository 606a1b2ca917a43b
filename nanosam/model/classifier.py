"""Classification as the methods see it: a network, and a head that works in chunks.

The classes are the pieces of a vocabulary, one for each of L positions, or those of an image (L =
1). The outputs are the last hidden states and the unembedding matrix, not the B x L x V logits. A
tied embedding is read by the body and handed to the head: the backward pass adds its two gradients.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from nanosam.data.batch import Batch
from nanosam.model import head
from nanosam.model.sharding import batch_shards, split_like_parameters, split_over_batch
from nanosam.model.transformer import ModelConfig, Params, Transformer, unembedding
from nanosam.model.vision import VisionTransformer
from nanosam.optim.objective import Pulled, Source, interleaved

STORE_LIMIT_BYTES = 2**27  # head.residual=auto stores a residual up to this size on each device

Network = Transformer | VisionTransformer  # of (inputs, segments) to last hidden states
NETWORKS: dict[str, type[Network]] = {"decoder": Transformer, "vit": VisionTransformer}

Hidden = Callable[[Params, Batch], jax.Array]  # to last hidden states, B x L x D


@dataclasses.dataclass(frozen=True)
class Classifier:
  """An Objective (nanosam/optim/objective.py)."""

  hidden: Hidden
  hidden_perturbed: Hidden  # the same, in the compute type of the second pass
  chunk: int  # of the head
  residual: str  # store | recompute | auto
  one_label: bool = False  # for a whole example: then it makes sense to count those that are right

  def outputs(self, params: Params, batch: Batch, *, perturbed: bool = False) -> head.Point:
    hidden = self.hidden_perturbed if perturbed else self.hidden
    return head.Point(hidden(params, batch), unembedding(params))

  def pull(
    self,
    sources: Sequence[tuple[float, Source]],
    at: head.Point,
    batch: Batch,
    total: jax.Array,
    *,
    store: bool = False,
  ) -> Pulled:
    given: list[tuple[float, Any]] = [(c, s.residual or s.outputs) for c, s in sources]
    pulled = head.vjp(given, at, targets(batch, total), chunk=self.chunk, keep=store)
    computed = iter(pulled.losses)
    losses = tuple(next(computed) if s.residual is None else None for _, s in sources)
    return Pulled(losses, pulled.gradient, pulled.residual)

  def weight(self, batch: Batch) -> jax.Array:
    return jnp.sum(batch.weights_BxL)

  def stores_residual(self, params: Params, batch: Batch) -> bool:
    """A residual costs memory, hidden states a matrix product."""
    size = math.prod(batch.targets_BxL.shape) * unembedding(params).shape[0]
    dtype = jax.eval_shape(self.hidden, params, batch).dtype
    fits = size * dtype.itemsize / batch_shards() <= STORE_LIMIT_BYTES
    return self.residual == "store" or (self.residual == "auto" and fits)

  def save(self, outputs: head.Point) -> jax.Array:
    return outputs.h_BxLxD

  def load(self, params: Params, saved: jax.Array) -> head.Point:
    return head.Point(saved, unembedding(params))

  def microbatches(self, batch: Batch, parts: int) -> Batch:
    return jax.tree.map(lambda x: split_over_batch(x, axis=1), interleaved(batch, parts))

  def like_parameters(self, gradient: Params) -> Params:
    return split_like_parameters(gradient)

  def token_losses(self, params: Params, batch: Batch) -> jax.Array:
    """Negative log-likelihood of each target, unweighted."""
    return head.token_losses(self.outputs(params, batch), batch.targets_BxL, chunk=self.chunk)

  def example_losses(self, at: head.Point, batch: Batch) -> jax.Array:
    """The mean over each example's targets; 0 if none counts."""
    losses_BxL = head.token_losses(at, batch.targets_BxL, chunk=self.chunk)
    weight_B = jnp.sum(batch.weights_BxL, axis=1)
    return jnp.sum(batch.weights_BxL * losses_BxL, axis=1) / jnp.where(weight_B > 0, weight_B, 1)

  def correct(self, params: Params, batch: Batch) -> jax.Array:
    """Whether each target is the class with the largest logit."""
    return head.correct(self.outputs(params, batch), batch.targets_BxL, chunk=self.chunk)

  def second_derivative(
    self, at: head.Point, speed: head.Point, acceleration: head.Point, batch: Batch, total: Any
  ) -> tuple[jax.Array, jax.Array]:
    """Of the loss, as the outputs move: by the curvature of the loss, and by that of the logits."""
    to = targets(batch, total)
    return head.second_derivative(at, speed, acceleration, to, chunk=self.chunk)


def targets(batch: Batch, total: jax.Array) -> head.Targets:
  return head.Targets(batch.targets_BxL, batch.weights_BxL / total)


def model_config(c: ml_collections.ConfigDict, outputs: int, dtype: str = "") -> ModelConfig:
  settings = {**c.model.to_dict(), "dtype": jnp.dtype(dtype or c.model.dtype)}
  return ModelConfig(**settings, V=outputs)


def make_network(c: ml_collections.ConfigDict, outputs: int, dtype: str = "") -> Network:
  """The network of a config, for so many classes."""
  return NETWORKS[c.model.kind](model_config(c, outputs, dtype))


def make_model(c: ml_collections.ConfigDict, outputs: int) -> Classifier:
  """The model of a config."""

  def hidden(dtype: str) -> Hidden:
    network = make_network(c, outputs, dtype)

    def apply(params: Params, batch: Batch) -> jax.Array:
      h_BxLxD = network.apply({"params": params}, batch.inputs, batch.segments_BxL)
      assert isinstance(h_BxLxD, jax.Array)
      return h_BxLxD

    return apply

  return Classifier(
    hidden(c.model.dtype),
    hidden(c.opt.perturbed_dtype),
    c.head.chunk,
    c.head.residual,
    one_label=c.model.kind == "vit",
  )
