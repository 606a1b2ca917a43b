"""Finiteness, checked on the device before every update.

Two kinds of trouble, each with its counter and policy: a loss or gradient at theta that is not
finite, and a second pass that alone goes wrong. (A direction of zero or non-finite length is no
trouble: the step is then a plain one, and counted.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanosam.optim.gradient import NO_PERTURBATION, Estimate, by_group
from nanosam.optim.objective import Params


class Policies(NamedTuple):
  """What to do about either; nanosam/config.py explains each (section guard)."""

  policy: str = "skip"
  perturbed: str = "skip"
  max_skips: int = 2**31 - 1


class Counts(NamedTuple):
  """Steps so far; they travel in the train state."""

  nonfinite: jax.Array
  perturbed_nonfinite: jax.Array
  no_perturbation: jax.Array

  @classmethod
  def zero(cls) -> "Counts":
    return cls(*(jnp.zeros((), jnp.int32) for _ in cls._fields))


class Verdict(NamedTuple):
  gradient: Params  # to use
  norms: dict[str, jax.Array]  # of the gradient, by group of parameters
  accept: jax.Array  # whether to update at all
  counts: Counts


def judge(guard: Any, estimated: Estimate, counts: Counts) -> Verdict:
  """`guard` is the config's; a run that is to abort stays where the trouble began."""
  loss = estimated.metrics.get("train/loss", jnp.zeros(()))
  loss_perturbed = estimated.metrics.get("train/loss_perturbed", jnp.zeros(()))
  norms = norms_by_group(estimated.gradient)
  good = jnp.isfinite(optax.tree.norm(norms)) & jnp.isfinite(loss_perturbed)
  first_good = jnp.isfinite(loss) & (good | (estimated.unperturbed == 0))
  second_bad = first_good & ~good
  gradient, accept = estimated.gradient, first_good & good
  if guard.perturbed == "plain" and estimated.plain is not None:
    gradient = jax.tree.map(
      lambda x, plain: jnp.where(second_bad, plain, x), gradient, estimated.plain
    )
    norms = norms_by_group(gradient)
    # What the perturbation leaves out may be bad at theta too, and reach only the gradient.
    accept = first_good = first_good & jnp.isfinite(optax.tree.norm(norms))
    second_bad &= first_good
  counts = Counts(
    counts.nonfinite + ~first_good,
    counts.perturbed_nonfinite + second_bad,
    counts.no_perturbation + (estimated.metrics.get(NO_PERTURBATION, jnp.zeros(())) > 0),
  )
  return Verdict(gradient, norms, accept & ~must_abort(guard, counts), counts)


def must_abort(guard: Any, counts: Any) -> Any:
  """Whether these counts end the run; on the device and on the host."""
  skips = (guard.policy == "skip") * counts.nonfinite
  skips += (guard.perturbed == "skip") * counts.perturbed_nonfinite
  return (
    ((guard.policy == "abort") & (counts.nonfinite > 0))
    | ((guard.perturbed == "abort") & (counts.perturbed_nonfinite > 0))
    | (skips > guard.max_skips)
  )


def norms_by_group(gradient: Params) -> dict[str, jax.Array]:
  return {group: optax.tree.norm(part) for group, part in by_group(gradient).items()}
