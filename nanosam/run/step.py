"""The train step and its state, as pure functions: the same for one core and for a pod."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.classifier import make_model, make_network
from nanosam.model.transformer import Params
from nanosam.optim import base, guard, methods, schedules
from nanosam.optim.gradient import Estimate, Metrics, Recipe, estimate, estimate_by_group
from nanosam.optim.methods import MethodError
from nanosam.optim.passes import Passes
from nanosam.run import attention, flops
from nanosam.system.errors import UsageError


@flax.struct.dataclass
class TrainState:
  step: jax.Array  # updates asked for so far
  params: Params
  opt_state: optax.OptState
  guard: guard.Counts
  memory = ()  # no field: the checkpoints of methods that remember nothing stay as they were


@flax.struct.dataclass
class RememberingState(TrainState):
  memory: Any = ()  # of the method, for its next step


def make_recipe(opt: ml_collections.ConfigDict, params: Params) -> Recipe:
  covered = base.matching(params, opt.perturb_params, "opt.perturb_params")
  return Recipe(*methods.resolve(opt), opt, base.only(covered))


class TrainStep:
  """Everything about one config that must be known before compiling its step."""

  def __init__(self, c: ml_collections.ConfigDict, outputs: int, mesh: Mesh):
    """`outputs`: pieces of the vocabulary, or classes of images."""
    self.config, self.mesh = c, mesh
    made_of = attention.resolved(c, mesh)
    self.attention = made_of.model.attention
    self.model, self._network = make_model(made_of, outputs), make_network(made_of, outputs)
    self.abstract_params = jax.eval_shape(self._init_params, jax.random.key(0))
    self.learning_rate, self.rho = schedules.learning_rate(c.opt), schedules.rho(c.opt)
    try:
      self.base = base.make_base(c.opt, self.abstract_params)
      self.recipe = make_recipe(c.opt, self.abstract_params)
    except MethodError as e:
      raise UsageError(str(e)) from e
    abstract = jax.eval_shape(self._init, jax.random.key(0))
    self.state_shardings = sharding.state_shardings(abstract, mesh)
    self.abstract_state = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      abstract,
      self.state_shardings,
    )

  def _init_params(self, key: jax.Array) -> Params:
    one = self._network.example()
    return self._network.init(key, jnp.zeros((1, *one.shape), one.dtype))["params"]

  def _init(self, key: jax.Array) -> TrainState:
    params = self._init_params(key)
    fields = (jnp.zeros((), jnp.int32), params, self.base.init(params), guard.Counts.zero())
    if self.recipe.when.remembers and self.rho != 0:  # with 0 it is the plain program
      return RememberingState(*fields, self.recipe.when.init(params))
    return TrainState(*fields)

  def init(self, seed: int) -> TrainState:
    with jax.set_mesh(self.mesh):
      return jax.jit(self._init, out_shardings=self.state_shardings)(jax.random.key(seed))

  def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step: estimate the gradient, check it, and let the base optimizer move."""
    batch = jax.tree.map(sharding.split_over_batch, batch)
    estimated, rho = self._estimate(state, batch)
    verdict = guard.judge(self.config.guard, estimated, state.guard)
    updates, opt_state = self.base.update(verdict.gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state, memory = jax.tree.map(
      lambda new, old: jnp.where(verdict.accept, new, old),
      (params, opt_state, estimated.memory),
      (state.params, state.opt_state, state.memory),
    )
    remembered = {"memory": memory} if isinstance(state, RememberingState) else {}
    metrics = {
      **estimated.metrics,
      **{f"guard/{name}": count for name, count in verdict.counts._asdict().items()},
      "tokens": jnp.sum(batch.weights_BxL),
      "opt/lr": self.learning_rate(base.updates_made(state.opt_state)),
      "opt/rho": jnp.asarray(rho),
      "opt/grad_norm": optax.tree.norm(verdict.norms),
      "opt/param_norm": optax.tree.norm(params),
      "opt/update_norm": optax.tree.norm(updates),
      **{f"grad_norm/{group}": norm for group, norm in verdict.norms.items()},
    }
    moved = dict(params=params, opt_state=opt_state, guard=verdict.counts, **remembered)
    return dataclasses.replace(state, step=state.step + 1, **moved), metrics

  def _estimate(self, state: TrainState, batch: Batch) -> tuple[Estimate, jax.Array | float]:
    c, updates = self.config, base.updates_made(state.opt_state)
    rho = self.rho if isinstance(self.rho, float) else self.rho(updates)
    if self.recipe.direction is None:
      rho = 0.0
    moments = base.moments(state.opt_state)._replace(updates=updates)
    passes = Passes(self.model, state.params, batch, c.grad_accumulation_steps)
    if c.opt.perturb_group:
      return estimate_by_group(self.recipe, passes, moments, rho, c.opt.perturb_group), rho
    return estimate(self.recipe, passes, moments, rho, state.memory), rho

  def mean_flops(self, traced: Any) -> float:
    """Of one step; a second pass counts as often as it is known to be due, else always."""
    return flops.mean(traced.jaxpr, self.recipe.when.share)

  def abstract_batch(self) -> Batch:
    c, one, L = self.config, self._network.example(), (self.config.model.L,)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
      where = sharding.batch_sharding(self.mesh)
      return jax.ShapeDtypeStruct((c.batch_size, *shape), dtype, sharding=where)

    segments = array(L, jnp.int32) if c.data.mask_documents else None
    inputs, targets = array(one.shape, one.dtype), array(L, jnp.int32)
    return Batch(inputs, targets, array(L, jnp.float32), segments)

  def trace(self) -> Any:
    """The step, traced for this mesh: `.jaxpr` to count, `.lower().compile()` to run."""
    with jax.set_mesh(self.mesh):
      out_shardings = (self.state_shardings, sharding.replicated(self.mesh))
      step = jax.jit(self.update, donate_argnums=0, out_shardings=out_shardings)
      return step.trace(self.abstract_state, self.abstract_batch())
