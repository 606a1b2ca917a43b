"""The family as one table: along what to perturb, which path the gradient takes, and when.

A gradient is J^T r: the Jacobian of the logits applied to the residual dloss/dlogits. Each factor
can be taken at theta (HERE) or at the perturbed theta' (THERE); that choice is the path.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from nanosam.optim import direction as along
from nanosam.optim import when as steps
from nanosam.optim.when import When

HERE, THERE = "theta", "theta'"


class MethodError(ValueError):
  """Settings that a method cannot work with; the message says which would do."""


class Term(NamedTuple):
  """J(jacobian)^T sum_i c_i r(site_i)."""

  jacobian: str
  residual: tuple[tuple[float, str], ...]


class Path(NamedTuple):
  """plain * g + the sum of the terms; or g plus the derivative of g along eps."""

  terms: tuple[Term, ...]
  plain: float = 0.0
  derivative: bool = False
  selects: bool = False  # the second pass is over the examples whose loss rises most

  def uses(self, site: str) -> bool:
    return any(site in (t.jacobian, *(s for _, s in t.residual)) for t in self.terms)

  def reuses_residual(self) -> bool:
    """Whether the second pass needs the residual of the first."""
    return any(site == HERE for term in self.terms for _, site in term.residual)


full = Path((Term(THERE, ((1.0, THERE),)),))
functional = Path((Term(THERE, ((1.0, HERE),)),))
logit = Path((Term(HERE, ((1.0, THERE),)),))
sharpest = full._replace(selects=True)
penalty = Path((), plain=1.0, derivative=True)


def angle(opt: Any) -> Path:
  """From the functional path (phi 0) to the logit path (phi pi/2); Eq. 19 of arXiv 2502.02407.

  The `short` form saves a backward pass and agrees to second order in rho.
  """
  s, c = math.sin(opt.phi), math.cos(opt.phi)
  if opt.angle_form == "short":
    return Path((Term(THERE, ((c - s, HERE), (s, THERE))),), plain=1 - c)
  return Path((Term(HERE, ((s, THERE),)), Term(THERE, ((c, HERE),))), plain=1 - s - c)


class Method(NamedTuple):
  direction: along.Direction | None
  path: Path | Callable[[Any], Path] = Path((), plain=1.0)
  when: When | Callable[[Any], When] = steps.always


class Row(NamedTuple):
  """A method, worked out for one config."""

  direction: along.Direction | None
  path: Path
  when: When


# fmt: off
METHODS: dict[str, Method] = {
  "adamw":                     Method(None),
  "sam":                       Method(along.gradient,                full),
  "func_sam":                  Method(along.gradient,                functional),
  "logit_sam":                 Method(along.gradient,                logit),
  "angle_sam":                 Method(along.gradient,                angle),
  "penalty_sam":               Method(along.gradient,                penalty),
  "precond_sam":               Method(along.preconditioned,          full),
  "precond_func_sam":          Method(along.preconditioned,          functional),
  "asam":                      Method(along.adaptive,                full),
  "momentum_sam":              Method(along.momentum,                full),
  "momentum_func_sam":         Method(along.momentum,                functional),
  "momentum_precond_func_sam": Method(along.preconditioned_momentum, functional),
  # Cheaper: a second pass at some steps only, or a direction that costs no gradient.
  "every_sam":                 Method(along.gradient,                full,       steps.every),
  "every_func_sam":            Method(along.gradient,                functional, steps.every),
  "every_precond_func_sam":    Method(along.preconditioned,          functional, steps.every),
  "look_sam":                  Method(along.gradient,                full,       steps.look),
  "look_func_sam":             Method(along.gradient,                functional, steps.look),
  "look_precond_func_sam":     Method(along.preconditioned,          functional, steps.look),
  "stale_sam":                 Method(along.last,                    full,       steps.last),
  "stale_func_sam":            Method(along.last,                    functional, steps.last),
  "ae_sam":                    Method(along.gradient,                full,       steps.adaptive),
  "ae_func_sam":               Method(along.gradient,                functional, steps.adaptive),
  "ae_precond_func_sam":       Method(along.preconditioned,          functional, steps.adaptive),
  # Of another length, or of some arrays only.
  "le_sam":                    Method(along.equal_rise,              full),
  "le_func_sam":               Method(along.equal_rise,              functional),
  "top_sam":                   Method(along.top,                     full),
  "esam":                      Method(along.random_share,            sharpest),
  # A control: a direction that knows nothing of the loss.
  "random_sam":                Method(along.random,                  full),
  "random_func_sam":           Method(along.random,                  functional),
}
# fmt: on


def row(name: str, opt: Any) -> Row:
  """A method of the table, worked out for these settings."""
  direction, path, when = METHODS[name]
  when = when if isinstance(when, When) else when(opt)
  found = Row(direction, path if isinstance(path, Path) else path(opt), when)
  _check_settings(name, found, opt)
  return found


def ascent_parts(opt: Any) -> int:
  """Of how many equal parts of a batch the direction sees one."""
  return round(1 / opt.ascent_fraction)


def _check_settings(name: str, found: Row, opt: Any) -> None:
  fraction = opt.ascent_fraction
  if not 0 < fraction <= 1 or abs(1 / fraction - round(1 / fraction)) > 1e-3 / fraction:
    raise MethodError(
      f"ascent_fraction={fraction} must be 1, 1/2, 1/3, ...: every n-th sequence makes the ascent"
    )
  if opt.rho_scaling == "layer" and found.direction is along.equal_rise:
    raise MethodError(
      f"{name} sets the length of eps by the rise of the loss: use rho_scaling=global"
    )
  if ascent_parts(opt) == 1 or found.direction is None:
    return
  uses, path = found.direction.needs_gradient, found.path
  if not uses or path.plain or path.derivative or path.selects or found.when.due:
    whole = "uses the gradient of the whole batch" if uses else "computes no gradient for it"
    raise MethodError(
      f"ascent_fraction={fraction} makes the direction of a part of the batch, and {name} {whole}: "
      "set it to 1, or use sam, func_sam or precond_func_sam"
    )


def resolve(opt: Any) -> Row:
  """The method of a config; refuses a base that cannot carry it."""
  found = row(opt.method, opt)
  needs = found.direction
  if needs and needs.needs_nu and opt.base != "adamw":
    raise MethodError(
      f"opt.method={opt.method} needs a second moment of every parameter, which "
      f"opt.base={opt.base} does not keep: use opt.base=adamw, or a method without precond"
    )
  if needs and needs.needs_mu and (opt.base not in ("adamw", "sgd", "lion") or not opt.b1):
    raise MethodError(
      f"opt.method={opt.method} needs a first moment of every parameter, which "
      f"opt.base={opt.base} with opt.b1={opt.b1} does not keep: use adamw, lion or sgd and b1 > 0"
    )
  return found
