"""The gradient that a method hands to the base optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanosam.optim.direction import Direction, Moments, layerwise, perturbation
from nanosam.optim.methods import HERE, THERE, MethodError, Path, ascent_parts
from nanosam.optim.objective import Batch, Params
from nanosam.optim.passes import Passes, Saved, accumulate
from nanosam.optim.when import Memory, When

NO_PERTURBATION = "guard/no_perturbation"
PERTURBED = "opt/perturbed"  # whether a step had its second pass, where that is decided as it runs

Metrics = dict[str, jax.Array]


class Recipe(NamedTuple):
  """A row of the table of methods, worked out for one config."""

  direction: Direction | None
  path: Path
  when: When
  opt: Any
  only_perturbed: Callable[[Params], Params]  # zeroes what is left out of the perturbation


class Estimate(NamedTuple):
  gradient: Params
  plain: Params | None  # the gradient at theta, if the method makes it
  metrics: Metrics
  unperturbed: jax.Array | float = 1.0  # the share of the tokens that had no second pass
  memory: Memory = ()  # for the next step


def estimate(
  method: Recipe, passes: Passes, moments: Moments, rho: jax.Array | float, memory: Memory = ()
) -> Estimate:
  """The gradient by `method`; a `rho` that is a float is constant, and decides while tracing."""
  direction, path, when = method.direction, method.path, method.when
  if direction is None or (isinstance(rho, float) and rho == 0):
    loss, g, _ = passes.first()
    return Estimate(g, g, {"train/loss": loss}, memory=memory)

  parts = ascent_parts(method.opt) if direction.needs_gradient else 1
  if direction.needs_gradient and parts == 1:
    loss, g, saved = passes.first(path)
    met = {"train/loss": loss}
  else:
    g, saved, met = None, Saved(), {}
  split = _split(passes, parts)

  def perturbed() -> tuple[Params, Metrics, jax.Array, Memory]:
    uphill, kept, known = g, saved, met
    if parts > 1:
      loss, uphill, kept = split.ascent(path, parts)
      known = {} if loss is None else {"train/loss": loss}
    eps, eps_metrics = _perturbation(method, uphill, passes, moments._replace(last=memory), rho)
    ahead = split
    if path.selects and method.opt.data_share < 1:
      ahead, kept = split.sharpest(eps, kept, method.opt.data_share), Saved()
    gradient, losses = ahead.second(path, eps, kept)
    if path.plain:
      gradient = jax.tree.map(lambda a, b: path.plain * a + b, g, gradient)
    metrics = {**_losses(losses), **known, **eps_metrics}
    return gradient, metrics, eps_metrics[NO_PERTURBATION], when.remember(gradient, memory)

  def unperturbed() -> tuple[Params, Metrics, jax.Array, Memory]:
    loss, plain = (met["train/loss"], g) if g is not None else passes.first()[:2]
    gradient, kept = when.instead(plain, memory, method.opt)
    if gradient is not plain and not isinstance(rho, float):  # a schedule's 0 is for all of it
      gradient = jax.tree.map(lambda x, y: jnp.where(rho > 0, x, y), gradient, plain)
    shape = jax.eval_shape(perturbed)[1]
    losses = {name: loss for name in shape if name.startswith("train/")}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    return gradient, {**zeros, **losses}, jnp.ones_like(zeros[NO_PERTURBATION]), kept

  due = None
  if when.due is not None:
    due, memory = when.due(g, memory, moments, method.opt)
  if not isinstance(rho, float):
    due = rho > 0 if due is None else due & (rho > 0)
  if due is None:
    gradient, metrics, share, memory = perturbed()
    return Estimate(gradient, g, metrics, share, memory)
  # The second pass is executed where it is due.
  if g is None or path.plain or path.selects or not path.uses(THERE):
    gradient, metrics, share, memory = jax.lax.cond(due, perturbed, unperturbed)
  else:
    gradient, metrics, share, memory = _one_or_the_other(
      due, method, passes, moments, rho, memory, (met["train/loss"], g, saved)
    )
  return Estimate(gradient, g, {**metrics, PERTURBED: due.astype(share.dtype)}, share, memory)


def _one_or_the_other(
  due: jax.Array,
  method: Recipe,
  passes: Passes,
  moments: Moments,
  rho: jax.Array | float,
  memory: Memory,
  first: tuple[jax.Array, Params, Saved],
) -> tuple[Params, Metrics, jax.Array, Memory]:
  """What follows a first pass: a second one where it is due, else what the row does instead.

  Either way needs theta' or g, not both. What a conditional is given lives until it ends, so it is
  given one array that is either.
  """
  when, (loss, g, saved) = method.when, first
  eps, eps_metrics = _perturbation(method, g, passes, moments, rho)
  either = jax.tree.map(lambda p, e, x: jnp.where(due, p + e, x), passes.params, eps, g)
  if when.holds_gradient:
    memory = jax.tree.map(lambda x, kept: jnp.where(due, x, kept), g, memory)

  def perturbed(theta: Params, memory: Memory) -> tuple[Params, Metrics, Memory]:
    gradient, losses = passes.second(method.path, theta, saved, theta)
    return gradient, {**_losses(losses), "train/loss": loss}, when.remember(gradient, memory)

  def unperturbed(g: Params, memory: Memory) -> tuple[Params, Metrics, Memory]:
    gradient, memory = when.instead(g, memory, method.opt)
    if gradient is not g and not isinstance(rho, float):  # a schedule's 0 is for all of it
      gradient = jax.tree.map(lambda x, y: jnp.where(rho > 0, x, y), gradient, g)
    names = jax.eval_shape(perturbed, g, memory)[1]
    return gradient, dict.fromkeys(names, loss), memory

  gradient, losses, memory = jax.lax.cond(due, perturbed, unperturbed, either, memory)
  metrics = {name: jnp.where(due, x, 0) for name, x in eps_metrics.items()}
  share = jnp.where(due, eps_metrics[NO_PERTURBATION], 1)
  return gradient, {**losses, **metrics}, share, memory


def _perturbation(
  method: Recipe, g: Params | None, passes: Passes, moments: Moments, rho: jax.Array | float
) -> tuple[Params, Metrics]:
  eps, usable = perturbation(_ray(method, g, passes.params, moments), rho)
  metrics = _eps_metrics(eps, usable, passes.params, method.opt.perturbed_dtype)
  # Measured first, so that eps need not outlive the making of theta'.
  return jax.lax.optimization_barrier((eps, metrics))


def _split(passes: Passes, parts: int) -> Passes:
  """The same passes, in microbatches of which every `parts`-th holds every `parts`-th example."""
  low, high = sorted((parts, passes.microbatches))
  if high % low:
    raise MethodError(
      f"ascent_fraction=1/{parts} with {passes.microbatches} microbatches: one of the two numbers "
      "must divide the other"
    )
  return dataclasses.replace(passes, microbatches=high)


def estimate_by_group(
  method: Recipe, passes: Passes, moments: Moments, rho: jax.Array | float, group: int
) -> Estimate:
  """m-SAM: each group of sequences has its own perturbation; gradients and metrics are averaged.

  For rows that remember nothing.
  """
  objective, total = passes.objective, passes.total_weight()
  groups = len(jax.tree.leaves(passes.batch)[0]) // group

  def one(batch: Batch) -> tuple[Any, None]:
    part = estimate(method, dataclasses.replace(passes, batch=batch), moments, rho)
    share = objective.weight(batch) / total
    return jax.tree.map(lambda x: share * x, part), None

  return accumulate(one, objective.microbatches(passes.batch, groups), groups)[0]


def _ray(method: Recipe, g: Params | None, params: Params, moments: Moments):
  mask, direction = method.only_perturbed, method.direction
  assert direction is not None
  if direction.substitute:
    g = direction.substitute(params, moments)
  if g is not None:
    g = mask(g)
  if moments.mu is not None:
    moments = moments._replace(mu=mask(moments.mu))
  ray = direction.ray(g, params, moments, method.opt)
  return ray if method.opt.rho_scaling == "global" else layerwise(ray)


def _losses(by_site: dict[str, jax.Array]) -> Metrics:
  names = {HERE: "train/loss", THERE: "train/loss_perturbed"}
  return {names[site]: loss for site, loss in by_site.items()}


def by_group(tree: Params) -> dict[str, list[jax.Array]]:
  """The arrays below each entry at the top of the tree."""
  groups: dict[str, list[jax.Array]] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    groups.setdefault(jax.tree_util.keystr(path[:1], simple=True) or "params", []).append(x)
  return groups


def cosine(a: Params, b: Params) -> jax.Array:
  lengths = optax.tree.norm(a) * optax.tree.norm(b)
  return optax.tree.vdot(a, b) / jnp.maximum(lengths, jnp.finfo(lengths.dtype).tiny)


def _eps_metrics(eps: Params, usable: jax.Array, params: Params, dtype: str) -> Metrics:
  """How large the perturbation is, and where it goes: no extra pass, a few sums."""
  squares = {k: optax.tree.norm(x, squared=True) for k, x in by_group(eps).items()}
  total = jnp.sum(jnp.stack(list(squares.values())))
  count = sum(x.size for x in jax.tree.leaves(eps))
  survival = {} if dtype == "float32" else {"opt/eps_cosine": _survival(eps, params, dtype)}
  return {
    **survival,
    "opt/eps_norm": jnp.sqrt(total),
    "opt/eps_ratio": jnp.sqrt(total) / optax.tree.norm(params),
    "opt/eps_rms": jnp.sqrt(total / count),
    NO_PERTURBATION: 1 - usable.astype(total.dtype),
    **{f"eps_share/{group}": s / jnp.maximum(total, 1e-30) for group, s in squares.items()},
  }


def _survival(eps: Params, params: Params, dtype: str) -> jax.Array:
  """Cosine of eps and what is left of it where weights are rounded to the compute type."""
  kind = jnp.finfo(dtype)

  def rounded(x: jax.Array) -> jax.Array:  # a cast and its inverse would be optimised away
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)

  return cosine(jax.tree.map(lambda w, e: rounded(w + e) - rounded(w), params, eps), eps)
