"""The loss of every document of a split under a model, and under the checkpoints of a proxy.

A token's loss belongs to the document that it stands in. Each token is scored once, in the rows
that training would pack, so a document may begin in the middle of a row and end in another; its bos
is left out, which says nothing about its text. Memory depends on neither the store nor the length
of its documents.
"""

import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh

from nanosam import config as config_lib
from nanosam.data.batch import Batch
from nanosam.data.packing import TokenRows
from nanosam.data.sources import StoreSource
from nanosam.data.store import Split
from nanosam.data.tokenizer import Tokenizer
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import Params
from nanosam.run import flops
from nanosam.run.restore import Opened
from nanosam.run.step import TrainStep
from nanosam.system.files import PARTIAL, disk_errors, lock_file, write_atomically, write_json
from nanosam.system.progress import Progress

UNTRAINED = 0  # the "step" of the model before training
SAVE_SECONDS = 5.0  # how much a kill may cost


class Position(NamedTuple):
  """Where the scoring of a split is."""

  row: int = 0
  nll: float = 0.0  # of the document that has begun, so far
  tokens: int = 0  # likewise


START = Position()


class Finished(NamedTuple):
  """The documents that end in one batch of rows."""

  first: int  # document
  loss: np.ndarray  # mean over the tokens of each
  at: Position  # after the batch


class Scorer:
  """Losses by document; the result depends on neither the batch size nor the devices."""

  def __init__(
    self,
    model: Classifier,
    split: Split,
    tokenizer: Tokenizer,
    c: ml_collections.ConfigDict,
    mesh: Mesh,
  ):
    self._split, self._mesh = split, mesh
    self._rows = TokenRows((split,), tokenizer, c.model.L, c.data.mask_documents)
    parts = sharding.shards(mesh)
    self._batch_size = -(-c.eval_batch_size // parts) * parts

    def losses(params: Params, batch: Batch) -> jax.Array:
      """With -1 for what does not count."""
      counts_BxL = (batch.weights_BxL > 0) & (batch.targets_BxL != tokenizer.bos_id)
      return jnp.where(counts_BxL, model.token_losses(params, batch), -1.0)

    self._losses = jax.jit(losses)

  def __len__(self) -> int:
    """Rows."""
    return len(self._rows)

  def flops(self, params: Params) -> float:
    """Of all rows, once."""
    with jax.set_mesh(self._mesh):
      traced = self._losses.trace(params, self._batch(0))
    return flops.count(traced.jaxpr) * len(self) / self._batch_size

  def __call__(
    self, params: Params, at: Position = START, rows: int = sys.maxsize
  ) -> Iterator[Finished]:
    """From a position on, to the end or to the batch that reaches so many rows."""
    pending: tuple[int, jax.Array] | None = None
    with jax.set_mesh(self._mesh):
      for row in range(at.row, min(len(self), rows), self._batch_size):
        losses_BxL = self._losses(params, self._batch(row))
        if pending:  # the batch before: the devices are busy while the host adds up
          yield (found := self._add_up(at, *pending))
          at = found.at
        pending = row, losses_BxL
      if pending:
        yield self._add_up(at, *pending)

  def _batch(self, row: int) -> Batch:
    stop = min(row + self._batch_size, len(self))
    local = self._rows.batch(range(row, stop)).padded(self._batch_size - (stop - row))
    return sharding.to_devices(local, self._mesh)

  def _add_up(self, at: Position, row: int, losses_BxL: jax.Array) -> Finished:
    stop = min(row + self._batch_size, len(self))
    L = losses_BxL.shape[1]
    start, end = row * L + 1, min(stop * L + 1, self._split.num_tokens)  # the targets' places
    loss_T = np.asarray(losses_BxL, np.float64).reshape(-1)[: end - start]
    counts_T = ~(loss_T < -0.5)  # NaN counts: a model that diverged is reported, not skipped
    first, ends = self._split.ends(start, end)
    borders = np.concatenate([[0], ends - start, [end - start]])
    nll, tokens = (
      np.diff(np.concatenate([[0], np.cumsum(x)])[borders])
      for x in (np.where(counts_T, loss_T, 0.0), counts_T)
    )
    nll[0], tokens[0] = nll[0] + at.nll, tokens[0] + at.tokens
    after = Position(stop, float(nll[-1]), int(tokens[-1]))
    return Finished(first, nll[:-1] / tokens[:-1], after)


def document_losses(scorer: Scorer, params: Params, rows: int = sys.maxsize) -> np.ndarray:
  """Of the documents that end within so many rows, at once: for a split that is small."""
  return np.concatenate([found.loss for found in scorer(params, rows=rows)])


class Scores:
  """The losses of a proxy's checkpoints on a store, in a folder that other weights share.

  STEP.npy holds the loss of each document; beside one that is not complete is its position.
  """

  def __init__(self, proxy: Opened, source: StoreSource, near: pathlib.Path):
    c = proxy.config
    self._proxy, self._mesh = proxy, sharding.make_mesh(data=1, fsdp=-1)
    self._train_step = TrainStep(c, source.outputs, self._mesh)
    self._split = source.store.split("train")
    self.scorer = Scorer(self._train_step.model, self._split, source.tokenizer, c, self._mesh)
    keys = config_lib.flat(config_lib.to_dict(c))
    key = {k: v for k, v in keys.items() if not config_lib.FREE_KEYS.fullmatch(k)}
    identity = {"store": source.fingerprint, "proxy": key, "data": proxy.source.fingerprint}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    self.folder = near / f"scores-{digest}"
    with disk_errors(self.folder):
      self.folder.mkdir(parents=True, exist_ok=True)
    write_json(self.folder / "proxy.json", identity)

  def flops(self) -> float:
    """Of the scoring of one checkpoint."""
    return self.scorer.flops(self._train_step.abstract_state.params)

  def of(self, steps: Sequence[int]) -> list[pathlib.Path]:
    """Files with the losses at these steps; makes those that are missing."""
    lock = lock_file(self.folder, wait=True)  # another command may want the same
    progress = Progress(0)
    missing = [step for step in steps if not self._file(step).exists()]
    try:
      for number, step in enumerate(missing):
        self._score(step, number, len(missing), progress)
    finally:
      progress.close()
      os.close(lock)
    return [self._file(step) for step in steps]

  def _file(self, step: int) -> pathlib.Path:
    return self.folder / f"{step}.npy"

  def _params(self, step: int) -> Params:
    if step == UNTRAINED:
      return self._train_step.init(self._proxy.config.seed).params
    wanted = {"params": self._train_step.abstract_state.params}
    return self._proxy.checkpoints.restore_parts(wanted, step)["params"]

  def _score(self, step: int, number: int, of: int, progress: Progress) -> None:
    file, rows = self._file(step), len(self.scorer)
    partial, state = file.with_name(file.name + PARTIAL), file.with_suffix(".json")
    with disk_errors(partial):
      at = _resume(partial, state)
      mode = "r+" if at.row else "w+"
      loss_D = np.lib.format.open_memmap(partial, mode, np.float64, (self._split.num_documents,))
      saved, here = time.monotonic(), f"checkpoint {step} ({number + 1} of {of})"
      for done in self.scorer(self._params(step), at):
        loss_D[done.first : done.first + len(done.loss)] = done.loss
        at = done.at
        progress.work(f"{here}  row {at.row}/{rows}", number * rows + at.row, of * rows)
        if time.monotonic() - saved > SAVE_SECONDS:
          loss_D.flush()
          write_atomically(state, json.dumps(at).encode())
          saved = time.monotonic()
      loss_D.flush()
      partial.replace(file)
      state.unlink(missing_ok=True)


def _resume(partial: pathlib.Path, state: pathlib.Path) -> Position:
  """The position that was saved; what had been written after it is written again."""
  try:
    return Position(*json.loads(state.read_bytes())) if partial.exists() else START
  except FileNotFoundError:
    return START
