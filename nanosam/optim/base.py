"""Base optimizers: what turns a gradient into an update, whatever method made the gradient."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanosam.optim import schedules
from nanosam.optim.direction import Moments
from nanosam.optim.methods import MethodError

AVERAGES = ("none", "ema", "tail")
MUON_BETA = 0.95
MUON_RMS = 0.2  # of its updates: like AdamW's, so that they can share a learning rate
ADAFACTOR_DECAY = 0.8


def _path(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _muon_axes(params: Any) -> Any:
  """Muon orthogonalises the layers' matrices; embeddings and norms get Adam."""

  def leaf(path, x):
    if not _path(path).endswith("kernel"):
      return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1)

  return jax.tree_util.tree_map_with_path(leaf, params)


def _muon(opt) -> optax.GradientTransformation:
  # At learning rate 1 and without decay this is the bare direction; the sign is undone because
  # the chain below applies the learning rate.
  return optax.chain(
    optax.contrib.muon(
      1.0,
      beta=MUON_BETA,
      adam_b1=opt.b1,
      adam_b2=opt.b2,
      eps=opt.eps,
      consistent_rms=MUON_RMS,
      muon_weight_dimension_numbers=_muon_axes,
    ),
    optax.scale(-1.0),
  )


def _adafactor(opt) -> optax.GradientTransformation:
  return optax.chain(
    optax.scale_by_factored_rms(decay_rate=ADAFACTOR_DECAY),
    optax.clip_by_block_rms(1.0),
    optax.scale_by_param_block_rms(),
  )


BASES: dict[str, Callable[[Any], optax.GradientTransformation]] = {
  "adamw": lambda opt: optax.scale_by_adam(b1=opt.b1, b2=opt.b2, eps=opt.eps),
  "sgd": lambda opt: optax.trace(opt.b1) if opt.b1 else optax.identity(),
  "lion": lambda opt: optax.scale_by_lion(b1=opt.b1, b2=opt.b2),
  "adafactor": _adafactor,
  "muon": _muon,
}


def matching(params: Any, pattern: str, key: str = "the pattern") -> Any:
  """True for the parameters whose path matches the regex `pattern`; one at least has to."""
  found = jax.tree_util.tree_map_with_path(lambda p, _: bool(re.search(pattern, _path(p))), params)
  if not any(jax.tree.leaves(found)):
    names = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    raise MethodError(f"{key}={pattern} matches no parameter; they are {', '.join(names)}")
  return found


# Of arXiv 2502.19002: the less sharp a kind of block is, the higher its rate.
PUBLISHED_BLOCK_RATES = "norm:1,value|out:4,mlp:6,query|key:8,embed:10"


def parse_block_rates(text: str) -> list[tuple[str, float]]:
  """ "embed:10,mlp:6" -> [("embed", 10.0), ("mlp", 6.0)]; ValueError if it is not of that form."""
  text = PUBLISHED_BLOCK_RATES if text == "published" else text
  found = [part.rpartition(":")[::2] for part in text.split(",")]
  number = re.compile(r"\d+\.?\d*(e-?\d+)?")
  if not all(pattern and number.fullmatch(rate) for pattern, rate in found):
    raise ValueError("write regex:factor,regex:factor, or published")
  return [(re.compile(pattern).pattern, float(rate)) for pattern, rate in found]


def block_rates(params: Any, text: str) -> Any:
  """What each parameter's learning rate is multiplied by: its first match's factor, else 1."""
  rates = parse_block_rates(text)
  for pattern, _ in rates:
    matching(params, pattern, "opt.block_rates")  # each must hit something

  def leaf(path: Any, _: Any) -> float:
    return next((rate for pattern, rate in rates if re.search(pattern, _path(path))), 1.0)

  return jax.tree_util.tree_map_with_path(leaf, params)


def _decayed(opt, params: Any) -> Any:
  return matching(params, opt.weight_decay_params, "opt.weight_decay_params")


def moments(opt_state: optax.OptState) -> Moments:
  """What an optimizer remembers of the gradients, wherever in its state: in chains, under masks.

  A parameter that it does not remember has a MaskedNode instead.
  """
  states = [s for s in jax.tree.leaves(opt_state, is_leaf=_remembers) if _remembers(s)]
  first = [s.trace if isinstance(s, optax.TraceState) else s.mu for s in states]
  adam = [s for s in states if hasattr(s, "nu")]
  return Moments(
    mu=_merged(first),
    nu=_merged([s.nu for s in adam]),
    steps=adam[0].count if adam else 0,
  )


def _remembers(state: Any) -> bool:
  return isinstance(state, optax.TraceState) or hasattr(state, "mu")


def _masked(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)


def _merged(trees: list[Any]) -> Any:
  """Trees that cover different parameters as one; None if there is none."""

  def first(*found: Any) -> Any:
    return next((x for x in found if not _masked(x)), optax.MaskedNode())

  return jax.tree.map(first, *trees, is_leaf=_masked) if trees else None


def only(covered: Any) -> Callable[[Any], Any]:
  """Zeroes the parameters that `covered`, a tree of booleans, leaves out; None covers all."""

  def zeroed(tree: Any) -> Any:
    if covered is None:
      return tree
    return jax.tree.map(lambda yes, x: x if yes else jnp.zeros_like(x), covered, tree)

  return zeroed


def updates_made(opt_state: optax.OptState) -> jax.Array:
  """What schedules go by: a step that the guard rejects does not count."""
  (schedule,) = (s for s in opt_state if isinstance(s, optax.ScaleByScheduleState))
  return schedule.count


class AveragedWeights(NamedTuple):
  """A state of the optimizer: it moves with it, and a rejected step leaves it alone."""

  updates: jax.Array
  average: Any


def average_weights(weight: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
  """Keeps average += weight(updates so far) * (params - average); changes no update."""

  def init(params: Any) -> AveragedWeights:
    return AveragedWeights(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

  def update(updates: Any, state: AveragedWeights, params: Any = None) -> tuple[Any, Any]:
    made = state.updates + 1
    w = weight(made)
    moved = jax.tree.map(lambda a, p, u: a + w * (p + u - a), state.average, params, updates)
    return updates, AveragedWeights(made, moved)

  return optax.GradientTransformation(init, update)


def average_weight(opt) -> Callable[[jax.Array], jax.Array]:
  """What the newest weights count in the average: 1 is a copy of them, 1/n the mean of n."""
  if opt.average == "ema":  # a plain mean at first, so that the start is soon forgotten
    return lambda n: jnp.maximum(1 - opt.average_decay, 1 / n)
  start = round(opt.num_train_steps * (1 - opt.average_fraction))
  return lambda n: 1 / jnp.maximum(n - start, 1)


def averaged(opt_state: optax.OptState) -> Any:
  """The averaged weights; None if the run keeps none."""
  return next((s.average for s in opt_state if isinstance(s, AveragedWeights)), None)


def make_base(
  opt, params: Any, rate: schedules.Schedule | None = None
) -> optax.GradientTransformation:
  """Clipping, the optimizer's direction, decoupled decay, learning rates, average: in order.

  `rate` replaces the learning rate of `opt`; the state stays the same.
  """
  clip = [optax.clip_by_global_norm(opt.clip_by_global_norm)] if opt.clip_by_global_norm else []
  decay = (
    [optax.add_decayed_weights(opt.weight_decay, _decayed(opt, params))] if opt.weight_decay else []
  )
  blocks = []
  if opt.block_rates:
    factors = block_rates(params, opt.block_rates)
    blocks = [optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, factors, u))]
  average = [average_weights(average_weight(opt))] if opt.average != "none" else []
  learning_rate = optax.scale_by_learning_rate(rate or schedules.learning_rate(opt))
  return optax.chain(*clip, BASES[opt.base](opt), *decay, *blocks, learning_rate, *average)
