"""Turns one chunk of the input into shards: the part of `prepare` that runs in worker processes.

A chunk is a sequence of raw records on disk. Its directory holds

    input                     the raw records; deleted when the chunk is complete
    train-00000.tokens, .documents, .array_record      and the same for validation, if any
    chunk.json                what is in it; written last, so it marks the chunk as complete

Imports neither jax nor tensorflow_datasets, so that a worker starts in a fraction of a second.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from nanosam.data.preparation import formats, tfrecord
from nanosam.data.store import ShardWriter
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError
from nanosam.system.files import write_json
from nanosam.system.processes import exit_with_parent

T = TypeVar("T")
RECORD = "chunk.json"
INPUT = "input"
SPLITS = ("train", "validation")
PLACES = 2**64
TEXT_FIELD = "text"  # in the output, whatever the input calls it
SHOWN_PROBLEMS = 5
_BIG_PIECE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Rules:
  """The arguments that decide what happens to a document."""

  text_field: str
  validation_fraction: float  # of the documents in files that belong to no split
  on_error: str  # fail | skip
  border: str = formats.WHOLE_FILE  # between the documents of a text file
  cut: int = 0  # where a lone document is cut, in characters: what follows is for validation

  def pieces(self, path: str, **size: int) -> Iterator[formats.Piece | formats.Problem]:
    return formats.pieces(path, self.text_field, border=self.border, **size)

  def parts(self, document: formats.Document) -> Iterator[tuple[str, formats.Document]]:
    """The splits that a document belongs to, each with its part of the text."""
    if not self.cut:
      yield self.split_of(document), document
      return
    halves = document.text[: self.cut], document.text[self.cut :]
    for split, text in zip(SPLITS, halves, strict=True):
      yield split, formats.Document(document.number, text, text.encode())

  def split_of(self, document: formats.Document) -> str:
    """By a hash of the text, so that copies of a document are always in the same split."""
    is_validation = place(document) < self.validation_fraction * PLACES
    return "validation" if is_validation else "train"


def place(document: formats.Document) -> int:
  """A number below PLACES, by a hash of the text."""
  return int.from_bytes(hashlib.sha256(document.utf8).digest()[:8], "big")


@dataclasses.dataclass(frozen=True)
class Chunk:
  directory: Path
  split: str | None  # None: decided per document
  pieces: tuple[tuple[str, int, int], ...]  # path, number of the first record, bytes
  problems: tuple[formats.Problem, ...]  # found while the input was read


class Problems:
  """Counts problems and remembers the first few, or raises at the first one."""

  def __init__(self, on_error: str):
    self._fail = on_error == "fail"
    self.count = 0
    self.first: list[str] = []

  def add(self, problem: formats.Problem) -> None:
    if self._fail:
      raise UserError(f"{problem}; fix it, or skip such documents with --on_error=skip")
    self.count += 1
    if len(self.first) < SHOWN_PROBLEMS:
      self.first.append(str(problem))

  def without(self, items: Iterable[T | formats.Problem]) -> Iterator[T]:
    """The items that are none."""
    for item in items:
      if isinstance(item, formats.Problem):
        self.add(item)
      else:
        yield item


_one_at_a_time: contextlib.AbstractContextManager = contextlib.nullcontext()


def start_worker(one_at_a_time: contextlib.AbstractContextManager) -> None:
  """Leaves ctrl-C to the parent, does not outlive it, and shares a lock for the big pieces."""
  global _one_at_a_time
  _one_at_a_time = one_at_a_time
  exit_with_parent()


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
  return Tokenizer.load(path)


def process(chunk: Chunk, rules: Rules, tokenizer_path: str) -> dict[str, Any]:
  """Writes the chunk's shards and chunk.json, and returns the contents of the latter."""
  tokenizer, problems = _tokenizer(tokenizer_path), Problems(rules.on_error)
  for problem in chunk.problems:
    problems.add(problem)
  writers: dict[str, _SplitWriter] = {}
  with open(chunk.directory / INPUT, "rb") as f:
    for path, first, size in chunk.pieces:
      # A document takes several times its size in memory: one big one at a time, in all workers.
      with _one_at_a_time if size >= _BIG_PIECE_BYTES else contextlib.nullcontext():
        parsed = formats.documents(formats.Piece(path, first, f.read(size), 0), rules.text_field)
        for document in problems.without(parsed):
          parts = [(chunk.split, document)] if chunk.split else rules.parts(document)
          for split, part in parts:
            if split not in writers:
              writers[split] = _SplitWriter(chunk.directory, split, tokenizer)
            writers[split].add(part)
  record = {
    "splits": {split: writer.commit() for split, writer in sorted(writers.items())},
    "skipped": problems.count,
    "first_skipped": problems.first,
  }
  write_json(chunk.directory / RECORD, record)
  os.unlink(chunk.directory / INPUT)
  return record


class _SplitWriter:
  """Writes the documents of one split, as tokens and as text."""

  def __init__(self, directory: Path, split: str, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    name = f"{split}-00000"
    self._tokens = ShardWriter(epath.Path(directory), name, tokenizer)
    self._path = directory / f"{name}.array_record"
    # Groups of one record, so that each document can be read on its own. Higher levels of zstd
    # save 5 % of the space but take twice the time.
    self._texts = ArrayRecordWriter(os.fspath(self._path), "group_size:1,zstd:1")

  def add(self, document: formats.Document) -> None:
    self._tokens.add(self._tokenizer.encode_array(document.text), len(document.utf8))
    with _as_os_error():
      self._texts.write(tfrecord.text_example(TEXT_FIELD, document.utf8))

  def commit(self) -> dict[str, Any]:
    with _as_os_error():
      self._texts.close()
    with open(self._path, "rb") as f:
      sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    return {"tokens": dataclasses.asdict(self._tokens.commit()), "text_sha256": sha256}


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
  try:
    yield
  except RuntimeError as e:  # raised by ArrayRecord when the disk is full
    raise OSError(str(e)) from e
