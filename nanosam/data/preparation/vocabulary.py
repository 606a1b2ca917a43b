"""Trains a vocabulary on a sample of bounded size, which depends on the corpus alone."""

import hashlib
import heapq
from collections.abc import Iterator, Sequence

from nanosam.data.preparation import formats
from nanosam.data.preparation.worker import Problems, Rules
from nanosam.data.tokenizer import Tokenizer, train_tokenizer

SETTINGS = ("vocab_size", "model_type", "sample_bytes")  # of `train`
_READ_PER_SAMPLED_BYTE = 32  # raw bytes, at most
_MIN_READ_PER_FILE = 4 << 20
_MAX_CHARS = 1 << 18  # of one document


def train(
  paths: Sequence[str], rules: Rules, *, vocab_size: int, model_type: str, sample_bytes: int
) -> Tokenizer:
  return train_tokenizer(sample(paths, rules, sample_bytes), vocab_size, model_type)


def sample(paths: Sequence[str], rules: Rules, sample_bytes: int) -> list[str]:
  """About `sample_bytes` of training documents: those with the smallest hashes.

  Only the beginnings of files are read, so that the cost does not grow with the corpus.
  """
  heap: list[tuple[int, str]] = []  # the largest hash first
  size = 0
  for document in _beginnings(paths, rules, _READ_PER_SAMPLED_BYTE * sample_bytes):
    if rules.split_of(document) != "train":
      continue
    text = document.text[:_MAX_CHARS]
    key = int.from_bytes(hashlib.sha256(b"sample" + document.utf8).digest()[:8], "big")
    heapq.heappush(heap, (-key, text))
    size += len(text.encode())
    while size > sample_bytes and len(heap) > 1:
      size -= len(heapq.heappop(heap)[1].encode())
  return [text for _, text in sorted(heap, reverse=True)]


def _beginnings(paths: Sequence[str], rules: Rules, read_bytes: int) -> Iterator[formats.Document]:
  problems = Problems(rules.on_error)
  per_file = max(_MIN_READ_PER_FILE, read_bytes // max(1, len(paths)))
  # Shuffled, because the order of file names often means something.
  order = sorted(range(len(paths)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
  for i in order:
    read = 0
    for piece in problems.without(formats.pieces(paths[i], rules.text_field)):
      yield from problems.without(formats.documents(piece, rules.text_field))
      read += len(piece.data)
      if read >= min(per_file, read_bytes):
        break
    read_bytes -= read
    if read_bytes <= 0:
      return
