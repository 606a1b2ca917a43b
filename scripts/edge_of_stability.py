"""Where full-batch training comes to rest, against theory: an oracle for methods and curvature.

python scripts/edge_of_stability.py [--steps=3000 --examples=500 --json]

Gradient descent sharpens until the largest eigenvalue of the Hessian is 2/lr, and stays there
(arXiv 2103.00065). With SAM the border depends on the gradient's length (arXiv 2309.12488); with
Adam it is that of the preconditioned Hessian, (2 + 2 b1) / ((1 - b1) lr), 38/lr at b1 0.9 (arXiv
2207.14484). A small MLP on scikit-learn's digits, squared loss; some minutes on one CPU core.
Needs pip install -e '.[vision]'.
"""

import json
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import nanosam
from nanosam.curvature import spectrum
from nanosam.optim import base
from nanosam.study.tables import Table, markdown
from nanosam.system import errors
from nanosam.system.command_line import Parser

WIDTH = 32
B1, B2, ADAM_EPS = 0.9, 0.99, 1e-7
Params = dict[str, jax.Array]


class Case(NamedTuple):
  name: str
  tx: Callable[[float], optax.GradientTransformation]
  lr: float
  rho: float = 0.0


def adam(lr: float) -> optax.GradientTransformation:
  return optax.adam(lr, b1=B1, b2=B2, eps=ADAM_EPS)


CASES = (
  Case("gd", optax.sgd, 0.4),
  Case("gd", optax.sgd, 0.6),
  Case("sam", optax.sgd, 0.1, 0.05),
  Case("sam", optax.sgd, 0.1, 0.15),
  Case("sam", optax.sgd, 0.2, 0.1),
  Case("adam", adam, 5e-4),
  Case("adam", adam, 1e-3),
)


def outputs(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
  h_BxF = jnp.tanh(batch["x"] @ params["in"])
  return jnp.tanh(h_BxF @ params["hidden"]) @ params["out"]


def loss(z_BxK: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
  return jnp.mean(jnp.sum((z_BxK - batch["y"]) ** 2, axis=1)) / 2


def digits(examples: int) -> dict[str, jax.Array]:
  try:
    from sklearn.datasets import load_digits
  except ImportError as e:
    raise errors.UserError("scikit-learn is missing: pip install -e '.[vision]'") from e
  images, labels = load_digits(return_X_y=True)
  x = images[:examples] / 16
  return {"x": jnp.asarray(x - x.mean(0)), "y": jax.nn.one_hot(labels[:examples], 10)}


def initial(key: jax.Array) -> Params:
  shapes = {"in": (64, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH, 10)}
  keys = jax.random.split(key, len(shapes))
  return {
    name: jax.random.normal(k, shape) / shape[0] ** 0.5
    for (name, shape), k in zip(shapes.items(), keys, strict=True)
  }


def sharpness(params: Params, batch: Any, scale: Params | None = None) -> float:
  """The largest eigenvalue of S H S, with S the diagonal `scale`; without: of H."""
  scaled = (lambda v: v) if scale is None else lambda v: jax.tree.map(jnp.multiply, v, scale)

  def apply(v: Params) -> Params:
    return scaled(_product(params, batch, scaled(v)))

  lanczos = spectrum.Lanczos(apply, lambda: jax.tree.map(jnp.ones_like, params), keep=True)
  found = None
  while found is None or found.residual > 1e-3 * abs(found.value):
    lanczos.advance()
    found = lanczos.eigenvalue(spectrum.LARGEST)
  return found.value


@jax.jit
def _product(params: Params, batch: Any, v: Params) -> Params:
  return nanosam.hessian_vector_product(outputs, loss, params, batch, v)


def root_preconditioner(state: Any) -> Params:
  """M^(-1/2), with M what Adam divides by: S H S has the eigenvalues of M^-1 H."""
  adam = base.moments(state)
  unbiased = jax.tree.map(lambda nu: nu / (1 - B2**adam.steps), adam.nu)
  return jax.tree.map(lambda nu: (jnp.sqrt(nu) + ADAM_EPS) ** -0.5, unbiased)


def edge(case: Case, gradient_norm: float) -> float:
  """What theory says of the sharpness at rest."""
  if case.name == "adam":
    return (2 + 2 * B1) / ((1 - B1) * case.lr)
  if not case.rho:
    return 2 / case.lr
  share = 8 * case.rho / (case.lr * gradient_norm)
  return gradient_norm / (2 * case.rho) * ((1 + share) ** 0.5 - 1)


def run(case: Case, batch: Any, steps: int, measurements: int = 40) -> dict[str, Any]:
  """Trains, and compares the sharpness with the edge over the last quarter of the run."""
  tx = case.tx(case.lr)
  grad = nanosam.value_and_grad(outputs, loss, method="sam" if case.rho else "adamw", rho=case.rho)

  @jax.jit
  def update(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
    (value, _), g = grad(params, batch, state)
    updates, state = tx.update(g, state, params)
    return optax.apply_updates(params, updates), state, value

  plain = jax.jit(jax.grad(lambda p: loss(outputs(p, batch), batch)))
  params = initial(jax.random.key(0))
  state = tx.init(params)
  trace = []
  for step in range(steps + 1):
    if step % (steps // measurements) == 0 and step > 0.75 * steps:
      scale = root_preconditioner(state) if case.name == "adam" else None
      norm = float(optax.tree.norm(plain(params)))
      trace.append((sharpness(params, batch, scale), edge(case, norm)))
    params, state, value = update(params, state)
  ratios = [found / expected for found, expected in trace]
  return {
    "case": f"{case.name}, lr {case.lr:g}" + (f", rho {case.rho:g}" if case.rho else ""),
    "sharpness": statistics.median(found for found, _ in trace),
    "edge": statistics.median(expected for _, expected in trace),
    "ratio": statistics.median(ratios),
    "from": min(ratios),
    "to": max(ratios),
    "loss": float(value),
  }


def table(rows: list[dict[str, Any]]) -> str:
  form = "{case}|{sharpness:.4g}|{edge:.4g}|{ratio:.3f}|{from:.2f} to {to:.2f}|{loss:.2g}"
  head = ["case", "sharpness", "edge", "ratio", "its range", "loss"]
  return "\n".join(markdown(Table(head, [form.format(**row).split("|") for row in rows])))


def main(argv: list[str]) -> None:
  p = Parser("scripts/edge_of_stability.py", __doc__)
  p.add_argument("--steps", type=int, default=3000)
  p.add_argument("--examples", type=int, default=500)
  p.add_argument("--json", action="store_true")
  args = p.parse_args(argv[1:])
  batch = digits(args.examples)
  rows = [run(case, batch, args.steps) for case in CASES]
  print(json.dumps(rows, indent=2) if args.json else table(rows))


if __name__ == "__main__":
  errors.run(main)
