"""What the pipeline hands to the model."""

from typing import Any, NamedTuple

Array = Any  # numpy on the host, jax on devices


class Batch(NamedTuple):
  inputs_BxL: Array  # int32
  targets_BxL: Array  # int32, the next token of each input
  weights_BxL: Array  # float32; 0 on padding, and across document borders when masked
  segments_BxL: Array | None  # int32, document number within the row (0 = padding), or None


class EvalSet(NamedTuple):
  batch: Batch  # all rows, [R, L]
  bytes: int  # exact UTF-8 bytes of its documents, for bits per byte
  documents: int
