"""Multi-head linear self-attention for in-context linear regression (arXiv 2501.16265).

A sequence has N pairs (x_n, y_n) with y_n = w x_n, and a query x_q whose y is to be predicted; x is
normal with covariance S and w with covariance 1, both drawn anew for each sequence. With keys and
queries of rank one, and without the weights that do not matter, the prediction is

  yhat = beta^T A x_q,   A = sum_h v_h k_h q_h^T,   beta = sum_n y_n x_n / N.

It is linear in A, so the squared loss is quadratic in A, and all that training needs of the data is
three moments: they are the batch, and A is the output. S is diagonal without loss of generality.

D features, H heads, N pairs of a context, P sequences; E = D + 1.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]  # v_H, k_HxD and q_HxD; or v_H and U_HxDxD if merged


class Moments(NamedTuple):
  """Means over sequences, with z = beta x_q^T."""

  yy: Any
  yz_DxD: Any
  zz_DxDxDxD: Any


class Sequences(NamedTuple):
  z_PxDxD: jax.Array
  y_P: jax.Array  # of the query


@dataclasses.dataclass(frozen=True)
class Task:
  """The distribution of sequences, and what follows from it in closed form."""

  spectrum: tuple[float, ...]  # eigenvalues of S, the largest first
  N: int  # pairs in a context

  @functools.cached_property
  def eigenvalues_D(self) -> np.ndarray:
    return np.array(self.spectrum)

  @functools.cached_property
  def second_D(self) -> np.ndarray:
    """Eigenvalues of E[Shat^2], where Shat = sum_n x_n x_n^T / N."""
    l_D = self.eigenvalues_D
    return l_D**2 + (l_D + l_D.sum()) * l_D / self.N

  @functools.cached_property
  def final_D(self) -> np.ndarray:
    """The best A is diagonal; a head of its own that learns it ends at the cube root."""
    return self.eigenvalues_D / self.second_D

  @functools.cached_property
  def plateaus(self) -> np.ndarray:
    """The loss when the first m features are learned, for m = 0 to D."""
    gains_D = self.eigenvalues_D**2 * self.final_D
    return self.eigenvalues_D.sum() - np.concatenate([[0.0], np.cumsum(gains_D)])

  @functools.cached_property
  def moments(self) -> Moments:
    """Of infinitely many sequences: what the test loss is measured on."""
    S, second = np.diag(self.eigenvalues_D), np.diag(self.second_D)
    return Moments(np.trace(S), S @ S, np.einsum("ik,jl->ijkl", second, S))

  def sample(self, key: jax.Array, P: int) -> Sequences:
    D, scale_D = len(self.spectrum), np.sqrt(self.eigenvalues_D)
    keys = jax.random.split(key, 3)
    x_PxNxD = jax.random.normal(keys[0], (P, self.N, D)) * scale_D[None, None]
    xq_PxD = jax.random.normal(keys[1], (P, D)) * scale_D[None]
    w_PxD = jax.random.normal(keys[2], (P, D))
    y_PxN = jnp.einsum("pnd,pd->pn", x_PxNxD, w_PxD)
    beta_PxD = jnp.einsum("pn,pnd->pd", y_PxN, x_PxNxD) / self.N
    return Sequences(jnp.einsum("pi,pj->pij", beta_PxD, xq_PxD), jnp.sum(w_PxD * xq_PxD, 1))


def moments(sequences: Sequences, weight_P: jax.Array) -> Moments:
  """A sequence of weight 2 counts as two."""
  z_PxDxD, y_P = sequences
  w_P = weight_P / jnp.sum(weight_P)
  return Moments(
    jnp.sum(w_P * y_P**2),
    jnp.einsum("p,pij->ij", w_P * y_P, z_PxDxD),
    jnp.einsum("p,pij,pkl->ijkl", w_P, z_PxDxD, z_PxDxD),
  )


def init(key: jax.Array, H: int, D: int, sigma: float) -> Params:
  v, k, q = jax.random.split(key, 3)
  shapes = {"v": (v, (H,)), "k": (k, (H, D)), "q": (q, (H, D))}
  return {name: sigma * jax.random.normal(key, shape) for name, (key, shape) in shapes.items()}


def matrix(params: Params, batch: Moments | None = None) -> jax.Array:
  """A; with `loss`, the two functions that a method is given."""
  return jnp.einsum("h,hi,hj->ij", params["v"], params["k"], params["q"])


def loss(A_DxD: jax.Array, batch: Moments) -> jax.Array:
  """The mean of (y - yhat)^2."""
  zz_A = jnp.einsum("ijkl,kl->ij", batch.zz_DxDxDxD, A_DxD)
  return batch.yy - 2 * jnp.sum(batch.yz_DxD * A_DxD) + jnp.sum(A_DxD * zz_A)


def squared_errors(A_DxD: jax.Array, sequences: Sequences) -> jax.Array:
  """Of each sequence."""
  return (sequences.y_P - jnp.einsum("pij,ij->p", sequences.z_PxDxD, A_DxD)) ** 2
