"""Packed rows of token splits, and the batch of any step.

Row r of a split is tokens[r*L : r*L + L + 1]: consecutive rows share one token, so every token but
the first is predicted exactly once per epoch. The rest of the last row is padding of weight 0.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from nanosam.data.batch import Batch, EvalSet, StreamOptions
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError

_SHUFFLE_ROUNDS = 4


def num_rows(num_tokens: int, L: int) -> int:
  return max(0, -(-(num_tokens - 1) // L))


def pack_rows(
  rows: Sequence[np.ndarray], *, L: int, tokenizer: Tokenizer, mask_documents: bool
) -> Batch:
  """A batch of rows of at most L + 1 tokens each."""
  packed = np.full((len(rows), L + 1), tokenizer.pad_id, np.int32)
  weights_BxL = np.ones((len(rows), L), np.float32)
  for i, row in enumerate(rows):
    packed[i, : len(row)] = row
    weights_BxL[i, len(row) - 1 :] = 0
  inputs_BxL, targets_BxL = packed[:, :-1].copy(), packed[:, 1:].copy()
  segments_BxL = None
  if mask_documents:
    begins_BxL = inputs_BxL == tokenizer.bos_id
    begins_BxL[:, 0] = True  # a row may begin inside a document, which is then its first
    segments_BxL = np.cumsum(begins_BxL, axis=1, dtype=np.int32)
    segments_BxL[weights_BxL == 0] = 0
    weights_BxL[targets_BxL == tokenizer.bos_id] = 0
  return Batch(inputs_BxL, targets_BxL, weights_BxL, segments_BxL)


def pack_tokens(tokens: np.ndarray, *, L: int, tokenizer: Tokenizer, mask_documents: bool) -> Batch:
  """All rows of a stream of tokens."""
  rows = [tokens[start : start + L + 1] for start in range(0, len(tokens) - 1, L)]
  return pack_rows(rows, L=L, tokenizer=tokenizer, mask_documents=mask_documents)


def documents_that_fit(lengths_D: np.ndarray, rows: int, L: int) -> int:
  """How many documents of these lengths (with bos and eos) fit in the rows, from the first on."""
  targets_D = lengths_D.cumsum() - 1
  documents = int(np.searchsorted(targets_D, rows * L, side="right"))
  if not documents:
    first = f"; the first needs {targets_D[0]}" if len(targets_D) else ""
    raise UserError(
      f"no validation document fits in {rows} rows of {L} tokens{first}: "
      "raise eval_steps or eval_batch_size"
    )
  return documents


def first_tokens(
  heads: Sequence[np.ndarray], table_Dx2: np.ndarray, *, L: int, tokenizer: Tokenizer
) -> EvalSet:
  """A row for each document, its first L tokens: how Nanodo evaluates, whose rows of L tokens have
  L - 1 targets. `table` has the tokens and the bytes of the whole documents."""
  if not heads:
    raise UserError("there is no validation document: prepare the data with some")
  num_bytes = 0
  for head, (length, size) in zip(heads, table_Dx2, strict=True):
    if len(head) < length:  # a character that was cut in two counts as not there
      size = len(tokenizer.decode(head.tolist()).rstrip("\ufffd").encode())
    num_bytes += int(size)
  batch = pack_rows(heads, L=L, tokenizer=tokenizer, mask_documents=False)
  return EvalSet(batch, num_bytes, len(heads))


def shuffled(position: int, size: int, data_seed: int) -> int:
  """Which of `size` items is at a position of an endless stream of permutations of them."""
  epoch, index = divmod(position, size)
  # Hashed, because with data_seed + epoch one seed's second epoch would be the next seed's first.
  digest = hashlib.sha256(f"{data_seed}/{epoch}".encode()).digest()
  return grain.experimental.index_shuffle(
    index, max_index=size - 1, seed=int.from_bytes(digest[:4], "big"), rounds=_SHUFFLE_ROUNDS
  )


class Rows(Protocol):
  """Everything in a training split that a row of a batch can be."""

  def __len__(self) -> int: ...
  def batch(self, rows: Sequence[int]) -> Batch: ...


class Tokens(Protocol):
  """A stream of tokens with random access, such as a split of a store."""

  @property
  def num_tokens(self) -> int: ...
  @property
  def num_documents(self) -> int: ...
  @property
  def num_bytes(self) -> int: ...
  def read(self, start: int, stop: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TokenRows:
  """Rows of streams of tokens, one stream after the other; no row crosses from one to the next."""

  streams: tuple[Tokens, ...]
  tokenizer: Tokenizer
  L: int
  mask_documents: bool

  @functools.cached_property
  def _ends(self) -> list[int]:
    rows = (num_rows(stream.num_tokens, self.L) for stream in self.streams)
    return list(itertools.accumulate(rows))

  def __len__(self) -> int:
    return self._ends[-1]

  def batch(self, rows: Sequence[int]) -> Batch:
    tokens = [self._read(row) for row in rows]
    return pack_rows(tokens, L=self.L, tokenizer=self.tokenizer, mask_documents=self.mask_documents)

  def _read(self, row: int) -> np.ndarray:
    k = bisect.bisect_right(self._ends, row)
    start = (row - (self._ends[k - 1] if k else 0)) * self.L
    return self.streams[k].read(start, start + self.L + 1)


@dataclasses.dataclass(frozen=True)
class HostBatches:
  """One host's rows of the global batch of any step: what Grain reads."""

  rows: Rows
  options: StreamOptions
  first_step: int = 0

  def __post_init__(self) -> None:
    o = self.options
    if o.rows.step != 1 or not 0 <= o.rows.start < o.rows.stop <= o.batch_size:
      raise ValueError(f"{o.rows} are not rows of a batch of {o.batch_size}")

  @property
  def last_step(self) -> int:
    o = self.options
    return sys.maxsize if o.repeat else len(self.rows) // o.batch_size

  def __len__(self) -> int:
    return self.last_step - self.first_step

  def __getitem__(self, index: int) -> Batch:
    o, size = self.options, len(self.rows)
    start = (self.first_step + index) * o.batch_size
    return self.rows.batch([shuffled(start + i, size, o.data_seed) for i in o.rows])
