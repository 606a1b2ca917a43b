"""Ends of the spectrum of a symmetric operator, and its trace, from products with it alone."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Vector = Any  # a pytree, in any layout over devices
LARGEST, SMALLEST = -1, 0  # algebraically


class Eigenvalue(NamedTuple):
  value: float
  # |A x - value x| of its unit vector x: some eigenvalue of A as it is computed, in fp32, is no
  # further than this. How far that A is from the exact one is another matter.
  residual: float


class Lanczos:
  """The operator `apply`, compressed to a tridiagonal matrix that grows by a row with each product.

  The ends of the spectrum come out first. Three vectors exist at a time. Rounding lets directions
  return that have converged: then an eigenvalue shows twice, but none is moved. With `keep`, for
  small models, all vectors are kept and each new one is made orthogonal to them.

  `start()` makes the first vector, and makes it again when an eigenvector is wanted: that is a sum
  over all vectors, for which the recurrence is replayed.
  """

  def __init__(
    self, apply: Callable[[Vector], Vector], start: Callable[[], Vector], keep: bool = False
  ):
    self._apply, self._start = apply, start
    self._vector, _ = _normalised(start())
    self._before = jax.tree.map(jnp.zeros_like, self._vector)
    self._diagonal: list[float] = []
    self._beside: list[float] = []  # the last one is the length that the next vector had
    self._kept: list[Vector] | None = [] if keep else None

  @property
  def iterations(self) -> int:
    return len(self._diagonal)

  def advance(self) -> None:
    """One more product."""
    v, coupling = self._vector, self._beside[-1] if self._beside else 0.0
    w, diagonal = _orthogonal(self._apply(v), v, self._before, coupling)
    if self._kept is not None:
      self._kept.append(v)
      for u in (*self._kept, *self._kept):  # the second round removes what the first one rounded
        w = _without(w, u)
    self._before = v
    self._vector, length = _normalised(w)
    self._diagonal.append(float(diagonal))
    self._beside.append(float(length))

  def eigenvalue(self, end: int) -> Eigenvalue:
    values, vectors = self.ritz()
    rounding = jnp.finfo(jax.tree.leaves(self._vector)[0].dtype).eps * np.abs(values).max()
    residual = max(abs(self._beside[-1] * vectors[-1, end]), rounding)
    return Eigenvalue(float(values[end]), float(residual))

  def eigenvector(self, end: int) -> Vector:
    coefficients = self.ritz()[1][:, end]
    total = jax.tree.map(jnp.zeros_like, self._vector)
    for c, v in zip(coefficients, self._vectors(), strict=True):
      total = _add(total, v, float(c))
    return _normalised(total)[0]

  def exhausted(self) -> bool:
    """Whether the next vector is nothing but rounding: all there is to find has been found."""
    return self._beside[-1] <= 1e-6 * np.abs(self.ritz()[0]).max()

  def ritz(self) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of the tridiagonal matrix, from the smallest on."""
    beside = self._beside[:-1]
    return np.linalg.eigh(np.diag(self._diagonal) + np.diag(beside, 1) + np.diag(beside, -1))

  def _vectors(self) -> Iterator[Vector]:
    if self._kept is not None:
      yield from self._kept
      return
    again = Lanczos(self._apply, self._start)
    yield again._vector
    for _ in range(self.iterations - 1):
      again.advance()
      yield again._vector


def converge(
  lanczos: Lanczos,
  ends: Sequence[int],
  *,
  rtol: float,
  most: int,
  report: Callable[[Lanczos], None] = lambda _: None,
) -> bool:
  """Advances until the residual of every wanted end is at most `rtol` of its value."""
  while lanczos.iterations < most:
    lanczos.advance()
    report(lanczos)
    found = [lanczos.eigenvalue(end) for end in ends]
    if all(e.residual <= rtol * abs(e.value) for e in found) or lanczos.exhausted():
      return True
  return False


@functools.partial(jax.jit, donate_argnums=0)
def _orthogonal(w: Vector, v: Vector, before: Vector, coupling: float) -> tuple[Vector, jax.Array]:
  w = jax.tree.map(lambda w, b: w - coupling * b, w, before)
  diagonal = optax.tree.vdot(w, v)
  return jax.tree.map(lambda w, v: w - diagonal * v, w, v), diagonal


@functools.partial(jax.jit, donate_argnums=0)
def _without(w: Vector, u: Vector) -> Vector:
  overlap = optax.tree.vdot(w, u)
  return jax.tree.map(lambda w, u: w - overlap * u, w, u)


@functools.partial(jax.jit, donate_argnums=0)
def _normalised(w: Vector) -> tuple[Vector, jax.Array]:
  length = optax.tree.norm(w)
  return jax.tree.map(lambda x: x / jnp.where(length > 0, length, 1), w), length


@functools.partial(jax.jit, donate_argnums=0)
def _add(total: Vector, v: Vector, factor: float) -> Vector:
  return jax.tree.map(lambda t, v: t + factor * v, total, v)


class Mean(NamedTuple):
  value: float
  sem: float  # standard error; infinite for a single sample


def mean(samples: Sequence[float]) -> Mean:
  n = len(samples)
  spread = float(np.std(samples, ddof=1)) if n > 1 else math.inf
  return Mean(float(np.mean(samples)), spread / math.sqrt(n))


def hutchinson(
  sample: Callable[[jax.Array], dict[str, float]],
  key: jax.Array,
  awaited: Sequence[str],
  *,
  rtol: float,
  most: int,
  report: Callable[[int, dict[str, Mean]], None] = lambda *_: None,
) -> tuple[dict[str, Mean], int]:
  """Means of random samples, until the awaited ones have a standard error of `rtol` of their value.

  At least eight are taken: the standard error of very few samples is itself a matter of luck.
  """
  samples: list[dict[str, float]] = []
  means: dict[str, Mean] = {}
  while len(samples) < most:
    samples.append(sample(jax.random.fold_in(key, len(samples))))
    means = {name: mean([s[name] for s in samples]) for name in samples[0]}
    report(len(samples), means)
    precise = all(means[k].sem <= rtol * abs(means[k].value) for k in awaited)
    if len(samples) >= 8 and precise:
      break
  return means, len(samples)
