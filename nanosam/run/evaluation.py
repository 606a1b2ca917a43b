"""Evaluation on a fixed set of sequences: loss with its standard error, bits per byte."""

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

from nanosam.data.batch import Batch, EvalSet
from nanosam.model import sharding
from nanosam.model.language_model import LanguageModel
from nanosam.model.transformer import Params
from nanosam.system.files import write_atomically


class Evaluation(NamedTuple):
  nll_R: np.ndarray  # summed negative log-likelihood of each sequence, in nats
  weight_R: np.ndarray  # predicted tokens of each sequence
  bytes: int

  @property
  def loss(self) -> float:
    return float(self.nll_R.sum() / self.weight_R.sum())

  @property
  def loss_sem(self) -> float:
    """Standard error of the loss over sequences: tokens of one sequence are not independent."""
    n = len(self.nll_R)
    spread = np.sum((self.nll_R - self.loss * self.weight_R) ** 2)
    return float(math.sqrt(n / max(n - 1, 1) * spread) / self.weight_R.sum())

  @property
  def bits_per_byte(self) -> float:
    return float(self.nll_R.sum() / math.log(2) / self.bytes)

  def __str__(self) -> str:
    return f"eval loss {self.loss:.4f} +- {self.loss_sem:.4f}  {self.bits_per_byte:.4f} bits/byte"

  def save(self, path: pathlib.Path, step: int) -> None:
    """Per-sequence losses, for paired comparisons between runs."""
    content = io.BytesIO()
    np.savez_compressed(content, step=step, nll=self.nll_R, weight=self.weight_R, bytes=self.bytes)
    write_atomically(path, content.getvalue())

  def metrics(self) -> dict[str, float]:
    return {
      "eval/loss": self.loss,
      "eval/loss_sem": self.loss_sem,
      "eval/bits_per_byte": self.bits_per_byte,
    }


def row_sums(model: LanguageModel, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Summed negative log-likelihood and weight of each sequence."""
  nll_BxL = model.token_losses(params, batch)
  return jnp.sum(nll_BxL * batch.weights_BxL, 1), jnp.sum(batch.weights_BxL, 1)


class Stopped(Exception):
  """An evaluation was not finished, as asked."""


class Evaluator:
  """Evaluates parameters; the result depends on neither the batch size nor the devices."""

  def __init__(self, model: LanguageModel, data: EvalSet, batch_size: int, mesh: Mesh):
    self._data, self._mesh = data, mesh
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
    nll_R, weight_R = (
      np.concatenate(x).astype(np.float64) for x in zip(*jax.device_get(parts), strict=True)
    )
    rows = len(self._data.batch.inputs_BxL)
    return Evaluation(nll_R[:rows], weight_R[:rows], self._data.bytes)

  def _batches(self) -> Iterator[Batch]:
    local = sharding.local_rows(self._mesh, self._batch_size)
    rows = len(self._data.batch.inputs_BxL)
    padding = -rows % self._batch_size  # padded rows weigh nothing
    padded = jax.tree.map(lambda x: np.pad(x, ((0, padding), (0, 0))), self._data.batch)
    for first in range(0, rows, self._batch_size):
      mine = slice(first + local.start, first + local.stop)
      yield sharding.to_devices(padded.rows(mine), self._mesh)
