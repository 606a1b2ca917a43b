"""The curvature of the loss, seen through products with its Hessian: the matrix is never formed.

H = H_G + H_F. The Gauss-Newton part H_G = J^T (d2loss/dlogits2) J is the curvature of the loss in
its logits; the functional part H_F = sum_k r_k d2logits_k/dtheta2 that of the network itself. They
are the derivatives, at eps = 0, of what the methods' second passes return: along the full path H,
along the logit path H_G, along the functional path H_F. So each is exact, and none is a difference.

Everything is in fp32, whatever a run was trained in; vectors lie as the parameters do.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh

from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.classifier import Classifier, make_model
from nanosam.model.transformer import Params
from nanosam.optim import direction, methods
from nanosam.optim.direction import Direction, Moments
from nanosam.optim.objective import Dense
from nanosam.optim.passes import Passes, Saved, accumulate

HESSIAN, GAUSS_NEWTON, FUNCTIONAL = methods.full, methods.logit, methods.functional
GRADIENT, PRECONDITIONED = "gradient", "preconditioned"
DIRECTIONS = {GRADIENT: direction.gradient, PRECONDITIONED: direction.preconditioned}
PREFIXES = {GRADIENT: "tau", PRECONDITIONED: "tau_precond"}  # of names in records


def exact_model(c: ml_collections.ConfigDict, outputs: int) -> Classifier:
  """The model of a config in fp32, with the attention that can be differentiated twice."""
  exact = ml_collections.ConfigDict(c.to_dict())
  exact.model.dtype = exact.opt.perturbed_dtype = "float32"
  exact.model.attention = "plain"
  return make_model(exact, outputs)


def product(passes: Passes, path: methods.Path, v: Params) -> Params:
  """H v, H_G v or H_F v."""
  zero = jax.tree.map(jnp.zeros_like, v)
  return jax.jvp(lambda eps: passes.second(path, eps, Saved())[0], (zero,), (v,))[1]


PARTS = {"H": HESSIAN, "HG": GAUSS_NEWTON, "HF": FUNCTIONAL}


def hessian_vector_product(
  outputs: Callable[[Params, Any], Any],
  loss: Callable[[Any, Any], jax.Array],
  params: Params,
  batch: Any,
  vector: Params,
  part: str = "H",
) -> Params:
  """H v for loss(outputs(params, batch), batch), or a part of it: H = H_G + H_F.

  `part` is "H", "HG" (Gauss-Newton: by the curvature of the loss in the outputs) or "HF" (by the
  curvature of the outputs in the parameters).

    >>> import jax.numpy as jnp, nanosam
    >>> outputs, loss = lambda p, x: p * x, lambda z, x: jnp.sum(z**2)
    >>> x, v = jnp.array([1.0, 3.0]), jnp.ones(2)
    >>> nanosam.hessian_vector_product(outputs, loss, jnp.ones(2), x, v).tolist()
    [2.0, 18.0]
  """
  return product(Passes(Dense(outputs, loss), params, batch), PARTS[part], vector)


def tau(
  outputs: Callable[[Params, Any], Any],
  loss: Callable[[Any, Any], jax.Array],
  params: Params,
  batch: Any,
  direction: Params | None = None,
) -> "Taus":
  """How much of the sharpness gradient along `direction` (default: the gradient) comes from the
  loss (logit), the network (func) and between them (cross); they sum to 1.

    >>> import jax.numpy as jnp, nanosam
    >>> outputs, loss = lambda p, x: p * x, lambda z, x: jnp.sum(z**2)  # linear: logit alone
    >>> [float(x) for x in nanosam.tau(outputs, loss, jnp.ones(2), jnp.array([1.0, 3.0]))]
    [1.0, 0.0, 0.0]
  """
  passes = Passes(Dense(outputs, loss), params, batch)
  return taus(passes, passes.first()[1] if direction is None else direction)


class Forms(NamedTuple):
  """z^T H_G z and z^T H_F z."""

  G: jax.Array
  F: jax.Array


def quadratic_forms(passes: Passes, z: Params) -> Forms:
  """By two derivatives of the forward pass along z: no backward pass, no activations are stored."""
  objective, total = passes.objective, passes.total_weight()

  def one(micro: Batch) -> tuple[Forms, None]:
    def moving(p: Params) -> tuple[Any, Any]:
      return jax.jvp(lambda p: objective.outputs(p, micro), (p,), (z,))

    (here, speed), (_, acceleration) = jax.jvp(moving, (passes.params,), (z,))
    return Forms(*objective.second_derivative(here, speed, acceleration, micro, total)), None

  return accumulate(one, passes.micros(), passes.microbatches)[0]


def rademacher(key: jax.Array, like: Params) -> Params:
  """Random signs; the same on any mesh."""
  leaves, tree = jax.tree.flatten(like)
  keys = jax.random.split(key, len(leaves))
  signs = [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return sharding.split_like_parameters(jax.tree.unflatten(tree, signs))


class Taus(NamedTuple):
  """Shares of the logit and the functional path in H d, the gradient of sharpness along d.

  Eq. 9 of arXiv 2502.02407: |H_G d|^2, |H_F d|^2 and 2 <H_G d, H_F d> over |H d|^2. They sum to 1.
  """

  logit: Any
  func: Any
  cross: Any


def taus(passes: Passes, d: Params) -> Taus:
  by_logit, by_func = (product(passes, path, d) for path in (GAUSS_NEWTON, FUNCTIONAL))
  whole = optax.tree.norm(jax.tree.map(jnp.add, by_logit, by_func), squared=True)
  return Taus(
    optax.tree.norm(by_logit, squared=True) / whole,
    optax.tree.norm(by_func, squared=True) / whole,
    2 * optax.tree.vdot(by_logit, by_func) / whole,
  )


@functools.partial(jax.jit, static_argnames=("along", "opt"))
def unit_direction(
  along: Direction, g: Params, params: Params, moments: Moments, opt: Hashable
) -> Params:
  """Where a method perturbs to if it may move all parameters; of length 1, which no tau sees."""
  vector = along.ray(g, params, moments, opt).vector
  return direction.perturbation(direction.Ray(vector, optax.tree.norm(vector)), 1.0)[0]


@jax.jit
def zeros_like(params: Params) -> Params:
  return sharding.split_like_parameters(jax.tree.map(jnp.zeros_like, params))


@functools.partial(jax.jit, donate_argnums=0)
def add(total: Params, x: Params, factor: jax.Array | float) -> Params:
  return jax.tree.map(lambda t, x: t + factor * x, total, x)


@jax.jit
def _inner(a: Params, b: Params) -> jax.Array:
  return optax.tree.vdot(a, b)


def inner(a: Params, b: Params) -> float:
  return float(_inner(a, b))


class Surface:
  """The loss on a few batches as a function of the parameters.

  Gradients and products are means over the batches, weighted by their tokens.
  """

  def __init__(
    self, model: Classifier, batches: Sequence[Batch], mesh: Mesh, microbatches: int = 1
  ):
    tokens = np.array([batch.weights_BxL.sum(dtype=float) for batch in batches])
    self.shares = (tokens / tokens.sum()).tolist()
    self.batches = [place(batch, mesh, microbatches) for batch in batches]
    self._mesh = mesh

    def passes(params: Params, batch: Batch) -> Passes:
      batch = jax.tree.map(sharding.split_over_batch, batch)
      return Passes(model, params, batch, microbatches)

    def gradient(params, batch, share, total):
      loss, g, _ = passes(params, batch).first()
      return share * loss, add(total, g, share)

    def loss(params, batch, d, distance):
      at = passes(jax.tree.map(lambda p, d: p + distance * d, params, d), batch)

      def one(micro: Batch) -> tuple[jax.Array, None]:
        nll_BxL = model.token_losses(at.params, micro)
        return jnp.sum(nll_BxL * micro.weights_BxL) / at.total_weight(), None

      return accumulate(one, at.micros(), microbatches)[0]

    def multiply(path, params, batch, share, v, total):
      return add(total, product(passes(params, batch), path, v), share)

    self._loss = jax.jit(loss)
    self._gradient = jax.jit(gradient, donate_argnums=3)
    self._product = jax.jit(multiply, static_argnums=0, donate_argnums=5)
    self._signs = jax.jit(rademacher)
    self._forms = jax.jit(lambda p, b, key: quadratic_forms(passes(p, b), rademacher(key, p)))
    self._taus = jax.jit(lambda p, b, d: taus(passes(p, b), d))

  @contextlib.contextmanager
  def exactly(self) -> Iterator[None]:
    with jax.set_mesh(self._mesh), jax.default_matmul_precision("highest"):
      yield

  def loss(self, params: Params, d: Params, distance: float) -> float:
    """At params + distance * d, by a forward pass."""
    with self.exactly():
      losses = [float(self._loss(params, batch, d, distance)) for batch in self.batches]
    return float(np.dot(self.shares, losses))

  def gradient(self, params: Params) -> tuple[float, Params]:
    """The loss and its gradient."""
    with self.exactly():
      losses, total = [], zeros_like(params)
      for share, batch in zip(self.shares, self.batches, strict=True):
        loss, total = self._gradient(params, batch, share, total)
        losses.append(loss)
    return sum(map(float, losses)), total

  def product(self, path: methods.Path, params: Params, v: Params) -> Params:
    with self.exactly():
      total = zeros_like(params)
      for share, batch in zip(self.shares, self.batches, strict=True):
        total = self._product(path, params, batch, share, v, total)
    return total

  def signs(self, params: Params, key: jax.Array) -> Params:
    """A random vector, laid out as the parameters."""
    with self.exactly():
      return self._signs(key, params)

  def probe(self, params: Params, key: jax.Array) -> dict[str, float]:
    """One unbiased sample of each trace.

    Every batch has signs of its own: the trace is linear in H, so their errors average out.
    """
    with self.exactly():
      keys = jax.random.split(key, len(self.batches))
      found = [self._forms(params, *x) for x in zip(self.batches, keys, strict=True)]
      G, F = np.asarray(self.shares) @ np.asarray(jax.device_get(found), float)
    return {"H": float(G + F), "HG": float(G), "HF": float(F)}

  def directions(self, g: Params, params: Params, moments: Moments, opt: Any) -> dict[str, Params]:
    """Unit vectors along which SAM perturbs, and its preconditioned form if there is a moment."""
    kinds = DIRECTIONS if moments.nu is not None else {GRADIENT: DIRECTIONS[GRADIENT]}
    opt = ml_collections.FrozenConfigDict(opt)
    with self.exactly():
      return {k: unit_direction(along, g, params, moments, opt) for k, along in kinds.items()}

  def taus(self, params: Params, moments: Moments, opt: Any) -> list[dict[str, Taus]]:
    """For each batch, along its own gradient, by direction."""
    found = []
    for number, batch in enumerate(self.batches):
      with self.exactly():
        g = self._gradient(params, batch, 1.0, zeros_like(params))[1]
      found.append(self.taus_along(params, self.directions(g, params, moments, opt), number))
    return found

  def taus_along(
    self, params: Params, directions: dict[str, Params], number: int = 0
  ) -> dict[str, Taus]:
    """On the batch of this number."""
    batch = self.batches[number]
    with self.exactly():
      return {k: jax.device_get(self._taus(params, batch, d)) for k, d in directions.items()}


def place(batch: Batch, mesh: Mesh, microbatches: int) -> Batch:
  """On the devices; rows that weigh nothing make it divide evenly."""
  rows = len(batch.targets_BxL)
  padding = -rows % (sharding.shards(mesh) * microbatches)
  local = sharding.local_rows(mesh, rows + padding)
  return sharding.to_devices(batch.padded(padding).rows(slice(local.start, local.stop)), mesh)
