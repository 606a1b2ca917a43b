"""What a change of the weights does to the eval loss: noise, rounding to a few bits.

A change takes parameters and a key, and returns parameters with the same layout over the devices;
it leaves alone what is not chosen. The third one, pruning, is in pruning.py.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanosam.model.sharding import STACKED
from nanosam.model.transformer import Params
from nanosam.optim.base import matching
from nanosam.optim.methods import MethodError
from nanosam.run.evaluation import Evaluation, Evaluator
from nanosam.system.errors import UsageError

Change = Callable[[Params, jax.Array], Params]
BITS = range(2, 17)  # that make sense


class Setting(NamedTuple):
  value: float  # its name: a scale, a number of bits, a sparsity
  change: Change
  draws: int = 1


class Point(NamedTuple):
  """What came out of a setting, or of some steps of training."""

  value: float
  evaluation: Evaluation  # the mean over draws
  facts: dict[str, Any]  # more to know


def choose(params: Params, pattern: str) -> Params:
  """True for the parameters that --params names."""
  try:
    return matching(params, pattern, "--params")
  except MethodError as e:
    raise UsageError(str(e)) from e


def points(
  evaluator: Evaluator, params: Params, chosen: Params, settings: Sequence[Setting], key: jax.Array
) -> Iterator[Point]:
  """One by one. The n-th draw has the same key in every setting."""
  for setting in settings:
    found: list[Evaluation] = []
    facts: dict[str, Any] = {}
    for draw in range(setting.draws):
      changed = setting.change(params, jax.random.fold_in(key, draw))
      found.append(evaluator(changed))
      facts["zero"] = zeros(changed, chosen)
    if setting.draws > 1:
      facts["draws"] = [evaluation.loss for evaluation in found]
    mean_R = np.mean([evaluation.nll_R for evaluation in found], axis=0)
    yield Point(setting.value, found[0]._replace(nll_R=mean_R, correct_R=None), facts)


def zeros(params: Params, chosen: Params) -> float:
  """Which fraction of the chosen weights is zero."""
  ours = [x for x, yes in zip(jax.tree.leaves(params), jax.tree.leaves(chosen), strict=True) if yes]
  return sum(map(int, jax.device_get(_zeros(ours)))) / sum(x.size for x in ours)


@jax.jit
def _zeros(arrays: list[jax.Array]) -> list[jax.Array]:
  return [jnp.sum(x == 0) for x in arrays]


def noise(chosen: Params, scale: float) -> Change:
  """Adds Gaussian noise of `scale` times the RMS of each matrix; one key, one direction."""

  def change(params: Params, key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))

    def leaf(path, x, yes):
      mine = next(keys)
      stacked = any(getattr(part, "key", None) == STACKED for part in path)
      return _placed(_noisy(x, mine, scale, stacked), x) if yes else x

    return jax.tree_util.tree_map_with_path(leaf, params, chosen)

  return change


@functools.partial(jax.jit, static_argnames="stacked")
def _noisy(x: jax.Array, key: jax.Array, scale: float, stacked: bool) -> jax.Array:
  rms = jnp.sqrt(jnp.mean(x**2, axis=tuple(range(stacked, x.ndim)), keepdims=True))
  return x + scale * rms * jax.random.normal(key, x.shape, x.dtype)


def rounding(chosen: Params, bits: int, group: int = 0) -> Change:
  """Rounds to the nearest of 2^bits - 1 values from -s to s, evenly spaced with 0 among them.

  s is the largest magnitude of an output channel, or of every `group` inputs of it. An embedding's
  channels are its rows, which are looked up, and of which each makes a logit.
  """
  levels = 2.0 ** (bits - 1) - 1  # above zero

  def change(params: Params, key: jax.Array) -> Params:
    def leaf(path, x, yes):
      inputs = x.ndim - (2 if path[-1].key == "kernel" else 1)
      return _placed(_rounded(x, levels, inputs, group or x.shape[inputs]), x) if yes else x

    return jax.tree_util.tree_map_with_path(leaf, params, chosen)

  return change


@functools.partial(jax.jit, static_argnames=("axis", "group"))
def _rounded(x: jax.Array, levels: float, axis: int, group: int) -> jax.Array:
  """The last group may be smaller than the others."""
  size = x.shape[axis]
  filled = jnp.pad(x, [(0, -size % group if i == axis else 0) for i in range(x.ndim)])
  split = filled.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :])
  step = jnp.max(jnp.abs(split), axis + 1, keepdims=True) / levels
  step = jnp.where(step > 0, step, 1)  # a group of zeros
  found = (jnp.round(split / step) * step).reshape(filled.shape)
  return jax.lax.slice_in_dim(found, 0, size, axis=axis)


def _placed(x: jax.Array, like: jax.Array) -> jax.Array:
  """On the same devices in the same parts, whatever the compiler chose."""
  return jax.device_put(x, like.sharding)
