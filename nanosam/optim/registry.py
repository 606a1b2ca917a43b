"""The optimizer family as one table: where to perturb, whose residual, whose Jacobian."""

from typing import NamedTuple


class Method(NamedTuple):
  """How the gradient that reaches the base optimizer is made."""


METHODS: dict[str, Method] = {
  "adamw": Method(),
}
