"""The methods for any model: what jax.value_and_grad is to a loss, with a method of the table."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from nanosam.optim import base, guard
from nanosam.optim.direction import Direction, Moments
from nanosam.optim.gradient import Metrics, Recipe, estimate
from nanosam.optim.methods import METHODS, MethodError, row
from nanosam.optim.objective import Batch, Dense, Objective, Outputs, Params
from nanosam.optim.passes import Passes

Rho = float | Callable[[jax.Array], jax.Array]


class Settings(NamedTuple):
  """What some methods can be told besides rho; nanosam/config.py explains each (section opt)."""

  phi: float = math.pi / 4
  angle_form: str = "exact"
  precond_variant: str = "post"
  precond_power: float = 1.0
  asam_eta: float = 0.01
  every: int = 5
  look_alpha: float = 0.7
  ascent_fraction: float = 1.0
  ae_start: float = 1.0
  ae_end: float = -1.0
  ae_decay: float = 0.9
  num_train_steps: int = 10_000  # ae_*: from ae_start to ae_end
  rho_scaling: str = "global"
  rho_max: float = 1.0
  top_share: float = 0.5
  weight_share: float = 0.5
  data_share: float = 0.5
  momentum_sign: float = 1.0
  b2: float = 0.999  # of the Adam in the optimizer state, for the preconditioned methods
  eps: float = 1e-8  # likewise
  perturbed_dtype: str = "float32"  # if the model rounds its weights to bfloat16, say so


class ValueAndGrad(Protocol):
  def __call__(
    self, params: Params, batch: Batch, opt_state: Any = (), step: Any = None, memory: Any = None
  ) -> tuple[tuple[jax.Array, Metrics], Params]: ...


def value_and_grad(
  outputs: Callable[[Params, Batch], Outputs],
  loss: Callable[[Outputs, Batch], jax.Array],
  *,
  method: str = "sam",
  rho: Rho = 0.05,
  has_aux: bool = False,
  weight: Callable[[Batch], jax.Array] | None = None,
  microbatches: int = 1,
  perturb: Any = None,
  fall_back: bool = False,
  **settings: Any,
) -> ValueAndGrad:
  """A function of (params, batch, opt_state) that returns ((loss, metrics), gradient).

  `outputs(params, batch)` is the model, `loss(outputs, batch)` a scalar, the mean over the batch.
  Hand the gradient to any optax optimizer; weight decay, clipping and schedules stay there.

    >>> import jax, jax.numpy as jnp, optax, nanosam
    >>> outputs = lambda params, batch: batch["x"] @ params["w"]
    >>> loss = lambda z, batch: jnp.mean((z - batch["y"]) ** 2)
    >>> grad = nanosam.value_and_grad(outputs, loss, method="precond_func_sam", rho=0.1)
    >>> params, tx = {"w": jnp.ones(2)}, optax.adam(0.1)
    >>> batch, state = {"x": jnp.eye(2), "y": jnp.zeros(2)}, tx.init(params)
    >>> (value, metrics), g = jax.jit(grad)(params, batch, state)
    >>> updates, state = tx.update(g, state, params)
    >>> float(value), round(float(metrics["opt/eps_norm"]), 4)
    (1.0, 0.1)

  Args:
    method: a row of `nanosam.METHODS`. Preconditioned and momentum methods read Adam's moments, or
      SGD's or Lion's momentum, from `opt_state`, inside any chain or mask.
      Methods that remember something (look_*, stale_*) return it as metrics["memory"]: pass it
      back as the argument `memory` of the next call. The first call has none.
    rho: the radius, or a schedule of the number of updates, which is Adam's count in `opt_state`
      or the argument `step` of the returned function.
    has_aux: `loss` returns (loss, aux), a tree of numbers that are averaged as the loss is; they
      come back in metrics["aux"].
    weight: of a batch, if examples do not count alike (padding, masks): `loss` is then a mean with
      these weights, and microbatches of unequal weight add up to the whole batch exactly.
    microbatches: parts that the batch is split into, one after another, to save memory; its arrays
      then share a leading axis of examples. (With one part a batch may be any tree.)
    perturb: a tree of booleans like `params`, or a function of `params` to one: what eps covers.
    fall_back: use the plain gradient where only the second pass is not finite.
    settings: fields of `Settings`.

  `metrics` has the losses that the method computes (train/loss at theta, train/loss_perturbed at
  theta'), the length of eps and its share in each group of parameters, and the guard's verdict:
  guard/nonfinite is 1 if the loss or gradient is not finite (skip that update),
  guard/perturbed_nonfinite if only the second pass is not.
  """
  if method not in METHODS:
    raise MethodError(f"unknown method '{method}': {', '.join(METHODS)}")
  if unknown := set(settings) - set(Settings._fields):
    raise MethodError(f"unknown setting '{unknown.pop()}': {', '.join(Settings._fields)}")
  opt = Settings(**settings)
  direction, path, when = row(method, opt)
  objective: Objective = Dense(outputs, loss, weight, has_aux)
  policies = guard.Policies(perturbed="plain" if fall_back else "skip")

  def call(
    params: Params, batch: Batch, opt_state: Any = (), step: Any = None, memory: Any = None
  ) -> tuple[tuple[jax.Array, Metrics], Params]:
    _check_functions(outputs, loss, params, batch, has_aux)
    covered = perturb(params) if callable(perturb) else perturb
    moments = base.moments(opt_state)
    radius: jax.Array | float = 0.0
    if direction is not None:
      counted = callable(rho) or when.needs_count or direction.needs_count
      updates: Any = _updates(method, step, moments) if counted else None
      radius = rho(updates) if callable(rho) else float(rho)
      moments = _needed(method, direction, moments, params, covered)._replace(updates=updates)
    recipe = Recipe(direction, path, when, opt, base.only(covered))
    passes = Passes(objective, params, batch, microbatches)
    before = when.init(params) if memory is None else memory
    estimated = estimate(recipe, passes, moments, radius, before)
    metrics, aux = _without_aux(estimated.metrics, has_aux)
    verdict = guard.judge(policies, estimated._replace(metrics=metrics), guard.Counts.zero())
    value = metrics.get("train/loss", metrics.get("train/loss_perturbed"))
    assert value is not None
    counts = {f"guard/{name}": n for name, n in verdict.counts._asdict().items()}
    metrics = {**metrics, **counts, **aux, "opt/rho": jnp.asarray(radius)}
    if when.remembers:
      metrics["memory"] = jax.tree.map(
        lambda new, old: jnp.where(verdict.accept, new, old), estimated.memory, before
      )
    return (value, metrics), verdict.gradient

  return call


def _check_functions(
  outputs: Callable[..., Outputs], loss: Callable[..., Any], params: Params, batch: Batch, aux: bool
) -> None:
  """Raises a MethodError if a gradient of loss(outputs) cannot be taken."""
  made = jax.eval_shape(outputs, params, batch)
  for path, x in jax.tree_util.tree_leaves_with_path(made):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      name = jax.tree_util.keystr(path) or "what it returns"
      raise MethodError(
        f"outputs cannot be differentiated: {name} is {x.dtype}; return what the loss depends on "
        "smoothly (logits, not their argmax)"
      )
  value = jax.eval_shape(loss, made, batch)
  if aux and not (isinstance(value, tuple) and len(value) == 2):
    raise MethodError("with has_aux, loss must return (loss, aux)")
  shape = getattr(value[0] if aux else value, "shape", None)
  if shape != ():
    raise MethodError(f"loss must return a scalar, not shape {shape}: take a mean over the batch")


def _updates(method: str, step: Any, moments: Moments) -> Any:
  if step is not None:
    return step
  if moments.nu is None:
    raise MethodError(
      f"{method}, or its rho, depends on the number of updates, and opt_state has no count: pass "
      "step=UPDATES"
    )
  return moments.steps


def _needed(
  method: str, direction: Direction, moments: Moments, params: Params, covered: Any
) -> Moments:
  """The moments that a direction needs, for all of the parameters; those it leaves out have 0."""
  found: dict[str, Any] = {}
  for name, wanted in (("mu", direction.needs_mu), ("nu", direction.needs_nu)):
    tree, kind = getattr(moments, name), {"mu": "first", "nu": "second"}[name]
    if not wanted:
      found[name] = None
      continue
    if tree is None:
      keepers = "optax.adam, lion, sgd with momentum" if name == "mu" else "optax.adam"
      raise MethodError(
        f"{method} needs a {kind} moment of every parameter: pass the opt_state of an optimizer "
        f"that keeps one ({keepers})"
      )
    found[name] = _filled(method, kind, tree, params, covered)
  return moments._replace(**found)


def _filled(method: str, kind: str, tree: Any, params: Params, covered: Any) -> Params:
  everything = jax.tree.map(lambda _: True, params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  wanted = jax.tree.leaves(everything if covered is None else covered)
  found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
  if len(found) != len(leaves):
    raise MethodError("opt_state belongs to other parameters: pass that of these")
  filled = []
  for (path, x), m, yes in zip(leaves, found, wanted, strict=True):
    if isinstance(m, optax.MaskedNode) and yes:
      raise MethodError(
        f"{method} needs a {kind} moment of every parameter that it perturbs, and the optimizer "
        f"has none for {jax.tree_util.keystr(path)}: leave it out with perturb="
      )
    filled.append(jnp.zeros_like(x) if isinstance(m, optax.MaskedNode) else m)
  return jax.tree.unflatten(jax.tree.structure(params), filled)


def _without_aux(metrics: Metrics, has_aux: bool) -> tuple[Metrics, dict[str, Any]]:
  """The losses by themselves; the aux values are those at theta where there is a pass."""
  if not has_aux:
    return metrics, {}
  pairs = {name: value for name, value in metrics.items() if name.startswith("train/")}
  aux = pairs.get("train/loss", pairs.get("train/loss_perturbed"))
  assert aux is not None
  return {**metrics, **{name: pair[0] for name, pair in pairs.items()}}, {"aux": aux[1]}
