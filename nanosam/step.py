"""The train step and its state, as pure functions: the same for one core and for a pod."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from nanosam import sharding
from nanosam.data.batch import Batch
from nanosam.model import ModelConfig, Params, Transformer
from nanosam.optim import base, gradient
from nanosam.optim.registry import METHODS

Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
  step: jax.Array  # updates made so far
  params: Params
  opt_state: optax.OptState


def model_config(c: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
  return ModelConfig(**{**c.model.to_dict(), "dtype": jnp.dtype(c.model.dtype), "V": vocab_size})


def make_net(c: ml_collections.ConfigDict, vocab_size: int) -> gradient.Net:
  model = Transformer(model_config(c, vocab_size))

  def hidden(params: Params, batch: Batch) -> jax.Array:
    h_BxLxD = model.apply({"params": params}, batch.inputs_BxL, batch.segments_BxL)
    assert isinstance(h_BxLxD, jax.Array)
    return h_BxLxD

  return gradient.Net(hidden, c.head.chunk)


class Trainer:
  """Everything about one config that must be known before compiling a step."""

  def __init__(self, c: ml_collections.ConfigDict, vocab_size: int, mesh: Mesh):
    self.config, self.mesh = c, mesh
    self.net = make_net(c, vocab_size)
    self._model = Transformer(model_config(c, vocab_size))
    self.abstract_params = jax.eval_shape(self._init_params, jax.random.key(0))
    self.base = base.make_base(c.opt, self.abstract_params)
    self.learning_rate = base.learning_rate(c.opt)
    self.method = METHODS[c.opt.method]
    abstract = jax.eval_shape(self._init, jax.random.key(0))
    self.state_shardings = sharding.state_shardings(abstract, mesh)
    self.abstract_state = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      abstract,
      self.state_shardings,
    )

  def _init_params(self, key: jax.Array) -> Params:
    tokens_1xL = jnp.zeros((1, self.config.model.L), jnp.int32)
    return self._model.init(key, tokens_1xL)["params"]

  def _init(self, key: jax.Array) -> TrainState:
    params = self._init_params(key)
    return TrainState(jnp.zeros((), jnp.int32), params, self.base.init(params))

  def init(self, seed: int) -> TrainState:
    with jax.set_mesh(self.mesh):
      return jax.jit(self._init, out_shardings=self.state_shardings)(jax.random.key(seed))

  def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step: estimate the gradient, then let the base optimizer move."""
    batch = jax.tree.map(sharding.split_over_batch, batch)
    loss, grads = gradient.estimate(
      self.method, self.net, state.params, batch, self.config.grad_accumulation_steps
    )
    updates, opt_state = self.base.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "train/loss": loss,
      "tokens": jnp.sum(batch.weights_BxL),
      "opt/lr": self.learning_rate(state.step),
      "opt/grad_norm": optax.global_norm(grads),
      "opt/param_norm": optax.global_norm(params),
      "opt/update_norm": optax.global_norm(updates),
    }
    return TrainState(state.step + 1, params, opt_state), metrics

  def abstract_batch(self) -> Batch:
    c = self.config

    def array(dtype):
      return jax.ShapeDtypeStruct(
        (c.batch_size, c.model.L), dtype, sharding=sharding.batch_sharding(self.mesh)
      )

    return Batch(
      array(jnp.int32),
      array(jnp.int32),
      array(jnp.float32),
      array(jnp.int32) if c.data.mask_documents else None,
    )

  def trace(self) -> Any:
    """The step, traced for this mesh: `.jaxpr` to count, `.lower().compile()` to run."""
    with jax.set_mesh(self.mesh):
      out_shardings = (self.state_shardings, sharding.replicated(self.mesh))
      step = jax.jit(self.update, donate_argnums=0, out_shardings=out_shardings)
      return step.trace(self.abstract_state, self.abstract_batch())
