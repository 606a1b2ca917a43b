"""Evaluation on a fixed set of sequences or images: loss with its standard error, and more."""

import functools
import io
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nanosam.data.batch import Batch, EvalSet, rows_per_unit
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import Params
from nanosam.system.files import write_atomically


class Evaluation(NamedTuple):
  """By rows: sequences, or images."""

  nll_R: np.ndarray  # summed negative log-likelihood of each row, in nats
  weight_R: np.ndarray  # predicted tokens of each sequence; 1 for an image
  bytes: int  # of text; 0 for images
  correct_R: np.ndarray | None = None  # 1 if an image's class was the likeliest
  documents: int = 0  # that the sequences come from; 0: each is independent

  @property
  def loss(self) -> float:
    return float(self.nll_R.sum() / self.weight_R.sum())

  @property
  def loss_sem(self) -> float:
    """Standard error of the loss over other text, for this very model; by the units that `compare`
    uses, since neighbouring sequences of one document are not independent."""
    rows = len(self.nll_R)
    length = min(rows_per_unit(rows, self.documents), -(-rows // 2))  # of one unit: no error at all
    starts = np.arange(0, rows, length)
    residual_U = np.add.reduceat(self.nll_R - self.loss * self.weight_R, starts)
    n = len(starts)
    return float(math.sqrt(n / max(n - 1, 1) * np.sum(residual_U**2)) / self.weight_R.sum())

  @property
  def bits_per_byte(self) -> float:
    return float(self.nll_R.sum() / math.log(2) / self.bytes)

  @property
  def accuracy(self) -> float | None:
    """Of images; of text it is not computed."""
    return None if self.correct_R is None else float(self.correct_R.sum() / self.weight_R.sum())

  def __str__(self) -> str:
    loss = f"eval loss {self.loss:.4f} +- {self.loss_sem:.4f}"
    if self.accuracy is not None:
      return f"{loss}  accuracy {self.accuracy:.2%}"
    return f"{loss}  {self.bits_per_byte:.4f} bits/byte"

  def save(self, path: pathlib.Path, step: int) -> None:
    """Per-sequence losses, for paired comparisons between runs."""
    content = io.BytesIO()
    facts: dict[str, Any] = {"step": step, "nll": self.nll_R, "weight": self.weight_R}
    if self.correct_R is not None:
      facts["correct"] = self.correct_R
    np.savez_compressed(content, **facts, bytes=self.bytes)
    write_atomically(path, content.getvalue())

  def metrics(self) -> dict[str, float]:
    loss = {"eval/loss": self.loss, "eval/loss_sem": self.loss_sem}
    if self.accuracy is not None:
      return {**loss, "eval/accuracy": self.accuracy}
    return {**loss, "eval/bits_per_byte": self.bits_per_byte}


def row_sums(model: Classifier, params: Params, batch: Batch) -> dict[str, jax.Array]:
  """Of each row: negative log-likelihood, weight, and for images whether the class is right."""

  def weighted(x_BxL: jax.Array) -> jax.Array:
    return jnp.sum(x_BxL * batch.weights_BxL, 1)

  found = {"nll_R": weighted(model.token_losses(params, batch))}
  if model.one_label:
    found["correct_R"] = weighted(model.correct(params, batch))
  return {**found, "weight_R": jnp.sum(batch.weights_BxL, 1)}


class Stopped(Exception):
  """An evaluation was not finished, as asked."""


class Evaluator:
  """Evaluates parameters; the result depends on neither the batch size nor the devices."""

  def __init__(
    self, model: Classifier, data: EvalSet, batch_size: int, mesh: Mesh, keep: bool = False
  ):
    """With `keep` the data stay on the devices, for many evaluations in a row."""
    self._data, self._mesh = data, mesh
    self._kept: list[Batch] | None = [] if keep else None
    parts = sharding.shards(mesh)
    self._batch_size = -(-batch_size // parts) * parts

    self._sums = jax.jit(
      functools.partial(row_sums, model), out_shardings=sharding.replicated(mesh)
    )

  def __call__(self, params: Params, stop: Any = False) -> Evaluation:
    """Raises Stopped if `stop` becomes true on the way."""
    parts = []
    with jax.set_mesh(self._mesh):
      for batch in self._batches():
        parts.append(self._sums(params, batch))
        if len(parts) > 1:
          jax.block_until_ready(parts[-2])  # one batch ahead, no more: memory, and a prompt stop
        if stop:
          raise Stopped
    rows = len(self._data.batch.targets_BxL)
    found = jax.tree.map(
      lambda *x: np.concatenate(x).astype(np.float64)[:rows], *jax.device_get(parts)
    )
    return Evaluation(**found, bytes=self._data.bytes, documents=self._data.documents)

  def _batches(self) -> Iterator[Batch]:
    if self._kept is None:
      yield from self._read()
      return
    self._kept = self._kept or list(self._read())
    yield from self._kept

  def _read(self) -> Iterator[Batch]:
    local = sharding.local_rows(self._mesh, self._batch_size)
    rows = len(self._data.batch.targets_BxL)
    padded = self._data.batch.padded(-rows % self._batch_size)
    for first in range(0, rows, self._batch_size):
      mine = slice(first + local.start, first + local.stop)
      yield sharding.to_devices(padded.rows(mine), self._mesh)
