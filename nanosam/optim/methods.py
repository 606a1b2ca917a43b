"""The family as one table: along what to perturb, and which path the gradient takes.

A gradient is J^T r: the Jacobian of the logits applied to the residual dloss/dlogits. Each factor
can be taken at theta (HERE) or at the perturbed theta' (THERE); that choice is the path.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from nanosam.optim import direction as along

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

  def uses(self, site: str) -> bool:
    return any(site in (t.jacobian, *(s for _, s in t.residual)) for t in self.terms)

  def reuses_residual(self) -> bool:
    """Whether the second pass needs the residual of the first."""
    return any(site == HERE for term in self.terms for _, site in term.residual)


full = Path((Term(THERE, ((1.0, THERE),)),))
functional = Path((Term(THERE, ((1.0, HERE),)),))
logit = Path((Term(HERE, ((1.0, THERE),)),))
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
}
# fmt: on


def row(name: str, opt: Any) -> tuple[along.Direction | None, Path]:
  """A method of the table, its path worked out for these settings."""
  method = METHODS[name]
  return method.direction, method.path(opt) if callable(method.path) else method.path


def resolve(opt: Any) -> tuple[along.Direction | None, Path]:
  """The method of a config; refuses a base that cannot carry it."""
  needs, path = row(opt.method, opt)
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
  return needs, path
