"""Batches, and the options of the streams that make them."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy on the host, jax on devices


class Batch(NamedTuple):
  """Rows of text, or images with a label each (L = 1)."""

  inputs: Array  # tokens [B, L] as int32, or images [B, S, S, 3] as uint8
  targets_BxL: Array  # int32, the next token of each input, or the image's class
  weights_BxL: Array  # float32; 0 on padding, and between documents if they are masked
  segments_BxL: Array | None = None  # int32, the document's number within the row (0 = padding)

  def rows(self, which: slice) -> "Batch":
    return Batch(*(x if x is None else x[which] for x in self))

  def padded(self, rows: int) -> "Batch":
    """With `rows` more rows, which weigh nothing."""

    def pad(x: Array) -> Array:
      return np.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1))

    return Batch(*(x if x is None else pad(x) for x in self))


class EvalSet(NamedTuple):
  batch: Batch  # all rows, [R, L]
  bytes: int  # exact UTF-8 bytes of its documents, for bits per byte
  documents: int  # 0 for images, which are independent of each other


def rows_per_unit(rows: int, documents: int | None) -> int:
  """How many neighbouring rows of an eval set count as one observation.

  Packed rows are cut from documents in order, so neighbours may come from one document and are not
  independent: a unit is a stretch of rows as long as two average documents (most text is in
  documents longer than average). Where each row is a document, or an image, it is one row.
  """
  return max(1, math.ceil(2 * rows / documents)) if documents and documents != rows else 1


EVAL_ROWS = ("packed", "documents")  # what a row of text is cut from
TOO_FEW_TOKENS = "train for fewer steps, add more data, or repeat it with --config.data.repeat=True"


class StreamOptions(NamedTuple):
  """How a host reads the training split."""

  L: int
  batch_size: int
  rows: range  # of the global batch: those of this host
  data_seed: int = 0
  repeat: bool = True  # start another epoch when the data ends
  mask_documents: bool = False
  workers: int = 0  # processes that read ahead; 0 = a thread
  prefetch: int = 4  # batches to read ahead


def batch_hash(batch: Batch, first_row: int = 0) -> str:
  """Identifies the data of a batch, or of one host's rows, which begin at `first_row`.

  `combine_hashes` of all hosts gives the hash of the whole batch, however its rows are divided.
  """
  inputs = np.reshape(batch.inputs, (len(batch.targets_BxL), -1))
  rows = np.concatenate([inputs, batch.targets_BxL], axis=1).astype("<i4")
  return combine_hashes(
    hashlib.blake2b(row.tobytes(), digest_size=8, salt=i.to_bytes(8, "little")).hexdigest()
    for i, row in enumerate(rows, first_row)
  )


def combine_hashes(hashes: Iterable[str]) -> str:
  """A sum, so that neither the order nor the grouping of rows matters."""
  return f"{sum(int(h, 16) for h in hashes) % 2**64:016x}"
