"""Packed rows of a token split, and the batch of any step.

Row r is tokens[r*L : r*L + L + 1]: neighbours share one token, so every token but the first is
predicted exactly once per epoch. The tail of the last row is padding of weight 0.
"""

import dataclasses
import hashlib
from typing import Protocol

import grain
import numpy as np

from nanosam.data.batch import Batch
from nanosam.data.store import Split
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError

_SHUFFLE_ROUNDS = 4


def num_rows(num_tokens: int, L: int) -> int:
  return max(0, -(-(num_tokens - 1) // L))


class Tokens(Protocol):
  def read(self, start: int, stop: int) -> np.ndarray:
    """Tokens start..stop-1; fewer if they end before."""
    ...


def pack_rows(
  tokens: Tokens,
  rows: list[int] | range,
  *,
  L: int,
  num_tokens: int,
  tokenizer: Tokenizer,
  mask_documents: bool,
) -> Batch:
  """Packs the given rows of the first `num_tokens` tokens."""
  packed = np.full((len(rows), L + 1), tokenizer.pad_id, np.int32)
  weights_BxL = np.ones((len(rows), L), np.float32)
  for i, row in enumerate(rows):
    found = tokens.read(row * L, min(row * L + L + 1, num_tokens))
    packed[i, : len(found)] = found
    weights_BxL[i, len(found) - 1 :] = 0
  inputs_BxL, targets_BxL = packed[:, :-1].copy(), packed[:, 1:].copy()
  segments_BxL = None
  if mask_documents:
    begins_BxL = inputs_BxL == tokenizer.bos_id
    begins_BxL[:, 0] = True  # A row may begin inside a document: that is its first.
    segments_BxL = np.cumsum(begins_BxL, axis=1, dtype=np.int32)
    segments_BxL[weights_BxL == 0] = 0
    weights_BxL[targets_BxL == tokenizer.bos_id] = 0
  return Batch(inputs_BxL, targets_BxL, weights_BxL, segments_BxL)


def documents_that_fit(lengths_D: np.ndarray, rows: int, L: int) -> int:
  """How many first documents of these lengths (with bos and eos) fit in the rows."""
  targets_D = lengths_D.cumsum() - 1
  documents = int(np.searchsorted(targets_D, rows * L, side="right"))
  if not documents:
    first = f"; the first needs {targets_D[0]}" if len(targets_D) else ""
    raise UserError(
      f"{rows} rows of {L} tokens hold no validation document{first}: "
      "raise eval_steps or eval_batch_size"
    )
  return documents


def shuffled(position: int, size: int, data_seed: int) -> int:
  """Which of `size` items stands at a position of an endless stream of permutations of them."""
  epoch, index = divmod(position, size)
  # Hashed, because data_seed + epoch would give one seed's second epoch to the next seed.
  digest = hashlib.sha256(f"{data_seed}/{epoch}".encode()).digest()
  return grain.experimental.index_shuffle(
    index, max_index=size - 1, seed=int.from_bytes(digest[:4], "big"), rounds=_SHUFFLE_ROUNDS
  )


@dataclasses.dataclass(frozen=True)
class HostBatches:
  """One host's rows of the global batch of any step: the random access that Grain reads."""

  split: Split
  tokenizer: Tokenizer
  L: int
  batch_size: int
  host_rows: range
  data_seed: int
  mask_documents: bool
  first_step: int
  last_step: int

  @property
  def rows_per_epoch(self) -> int:
    return num_rows(self.split.num_tokens, self.L)

  def __len__(self) -> int:
    return self.last_step - self.first_step

  def __getitem__(self, index: int) -> Batch:
    start = (self.first_step + index) * self.batch_size
    rows = [shuffled(start + i, self.rows_per_epoch, self.data_seed) for i in self.host_rows]
    return pack_rows(
      self.split,
      rows,
      L=self.L,
      num_tokens=self.split.num_tokens,
      tokenizer=self.tokenizer,
      mask_documents=self.mask_documents,
    )
