"""What the pipeline hands to the model."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy on the host, jax on devices


class Batch(NamedTuple):
  inputs_BxL: Array  # int32
  targets_BxL: Array  # int32, the next token of each input
  weights_BxL: Array  # float32; 0 on padding, and across document borders when masked
  segments_BxL: Array | None  # int32, document number within the row (0 = padding), or None

  def rows(self, which: slice) -> "Batch":
    return Batch(*(x if x is None else x[which] for x in self))


class EvalSet(NamedTuple):
  batch: Batch  # all rows, [R, L]
  bytes: int  # exact UTF-8 bytes of its documents, for bits per byte
  documents: int


TOO_FEW_TOKENS = (
  "train for fewer steps, bring more data, or read it again with --config.data.repeat=True"
)


class Reading(NamedTuple):
  """How a training split is read: in which batches, in which order, and by whom."""

  L: int
  batch_size: int
  rows: range  # of the global batch, which this host makes; it reads nothing else
  data_seed: int = 0
  repeat: bool = True  # another epoch when the data ends
  mask_documents: bool = False
  workers: int = 0  # processes that read ahead; 0 = threads in this one
  prefetch: int = 4  # batches read ahead


def batch_hash(batch: Batch, first_row: int = 0) -> str:
  """Names the tokens of a batch, or of a host's rows of it, which begin at `first_row`.

  Hashes of the hosts' rows combine to that of the whole batch, however it was dealt out.
  """
  rows = np.concatenate([batch.inputs_BxL, batch.targets_BxL], axis=1).astype("<i4")
  return combine_hashes(
    hashlib.blake2b(row.tobytes(), digest_size=8, salt=i.to_bytes(8, "little")).hexdigest()
    for i, row in enumerate(rows, first_row)
  )


def combine_hashes(hashes: Iterable[str]) -> str:
  """The sum, so that it depends on neither the order nor the grouping of the rows."""
  return f"{sum(int(h, 16) for h in hashes) % 2**64:016x}"
