"""Trains a vocabulary on a sample of bounded size, which depends on the corpus alone."""

import hashlib
import heapq
import os
import re
from collections.abc import Iterator, Sequence

from nanosam.data.preparation import formats
from nanosam.data.preparation.worker import Problems, Rules
from nanosam.data.tokenizer import Tokenizer, VocabularySizeError, train_tokenizer

SETTINGS = ("vocab_size", "model_type", "sample_bytes")  # of `train`
_READ_PER_SAMPLED_BYTE = 32  # raw bytes, at most
_MIN_READ_PER_FILE = 4 << 20
_MAX_CHARS = 1 << 18  # of one document
_BYTES_PER_PIECE = 256
_SMALLEST = 512


def train(
  paths: Sequence[str],
  rules: Rules,
  *,
  vocab_size: int,
  model_type: str,
  sample_bytes: int,
  may_be_smaller: bool = False,
  log: os.PathLike[str] | None = None,
) -> Tokenizer:
  """A vocabulary of `vocab_size` pieces, or of fewer if that may be and the text is small.

  The trainer's own lines go to the file `log`, which `progress_in` reads.
  """
  texts = sample(paths, rules, sample_bytes)
  if log:  # this process trains one vocabulary and nothing else
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
  fit = _train_what_fits if may_be_smaller else train_tokenizer
  return fit(texts, vocab_size, model_type, quiet=log is None)


def _train_what_fits(
  texts: Sequence[str], vocab_size: int, model_type: str, quiet: bool
) -> Tokenizer:
  """If the text is too small for it, about a piece for every 256 bytes, in a power of two."""
  try:
    return train_tokenizer(texts, vocab_size, model_type, quiet)
  except VocabularySizeError as e:
    size = sum(len(text.encode()) for text in texts) // _BYTES_PER_PIECE
    size = min(max(1 << size.bit_length() >> 1, _SMALLEST), e.most or vocab_size)
  for _ in range(2):
    try:
      return train_tokenizer(texts, size, model_type, quiet)
    except VocabularySizeError as e:  # e.most is for a vocabulary of this size
      size = e.least or e.most
  return train_tokenizer(texts, size, model_type, quiet)


def progress_in(log: os.PathLike[str]) -> str:
  """What the trainer's lines say: how many pieces it has, on the way down (unigram) or up (bpe)."""
  try:
    with open(log, "rb") as f:
      f.seek(max(0, os.fstat(f.fileno()).st_size - 4096))
      sizes = re.findall(rb"(?:EM sub_iter|Added).* size=(\d+)", f.read())
  except OSError:
    return ""
  return f", {int(sizes[-1]):,} pieces" if sizes else ""


def sample(paths: Sequence[str], rules: Rules, sample_bytes: int) -> list[str]:
  """About `sample_bytes` of training documents: those with the smallest hashes.

  Only the beginnings of files are read, so that the cost does not grow with the corpus.
  """
  heap: list[tuple[int, str]] = []  # the largest hash first
  size = 0
  for document in _beginnings(paths, rules, _READ_PER_SAMPLED_BYTE * sample_bytes):
    split, document = next(rules.parts(document))
    if split != "train":
      continue
    text = document.text[: sample_bytes if rules.cut else _MAX_CHARS]
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
    for piece in problems.without(rules.pieces(paths[i])):
      yield from problems.without(formats.documents(piece, rules.text_field))
      read += len(piece.data)
      if read >= min(per_file, read_bytes):
        break
    read_bytes -= read
    if read_bytes <= 0:
      return
