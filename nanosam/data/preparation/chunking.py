"""Divides the input files into chunks on disk, without parsing them: work for the workers.

Chunk 12 of group 3 of the input files is the directory 00003-00012 (see worker.py), and
group-00003.json holds the number of chunks in that group.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nanosam.data.preparation import formats
from nanosam.data.preparation.inputs import Plan
from nanosam.data.preparation.worker import INPUT, RECORD, Chunk, Problems, Rules
from nanosam.system.files import write_json

# A chunk, or None if it is complete already; and how many bytes of the input files it covers.
Task = tuple[Chunk | None, int]


def make_chunks(folder: Path, plan: Plan, rules: Rules) -> Iterator[Task]:
  """All chunks in order, with their raw input on disk. Groups that are complete are not read."""
  for g, group in enumerate(plan.groups):
    if _group_file(folder, g).exists() and all(map(_is_complete, chunk_directories(folder, g))):
      yield None, sum(plan.inputs[i].bytes for i in group)
      continue
    writer = _ChunkWriter(folder, g, plan.inputs[group[0]].split, plan.shard_bytes)
    for path in plan.paths(group):
      yield from writer.add_file(path, rules)
    yield from writer.end_chunk()
    write_json(_group_file(folder, g), {"chunks": writer.count})


def chunk_directories(folder: Path, group: int) -> list[Path]:
  """The chunks of a group whose number of chunks is known."""
  count = json.loads(_group_file(folder, group).read_bytes())["chunks"]
  return [_chunk_directory(folder, group, i) for i in range(count)]


def delete_group(folder: Path, group: int) -> None:
  _group_file(folder, group).unlink(missing_ok=True)
  for directory in folder.glob(f"{group:05d}-*"):
    shutil.rmtree(directory)


def _is_complete(directory: Path) -> bool:
  return (directory / RECORD).exists()


def _group_file(folder: Path, group: int) -> Path:
  return folder / f"group-{group:05d}.json"


def _chunk_directory(folder: Path, group: int, number: int) -> Path:
  return folder / f"{group:05d}-{number:05d}"


class _ChunkWriter:
  """Writes pieces of input files to disk until they fill a chunk."""

  def __init__(self, folder: Path, group: int, split: str | None, shard_bytes: int):
    self._folder, self._group, self._split = folder, group, split
    self._shard_bytes = shard_bytes
    self.count = 0
    self._begin()

  def _begin(self) -> None:
    self._directory = _chunk_directory(self._folder, self._group, self.count)
    self._complete = _is_complete(self._directory)
    if not self._complete:
      shutil.rmtree(self._directory, ignore_errors=True)
    self._pieces: list[tuple[str, int, int]] = []
    self._problems: list[formats.Problem] = []
    self._size = self._stored = 0
    self._input: IO[bytes] | None = None

  def add_file(self, path: str, rules: Rules) -> Iterator[Task]:
    read = 0
    piece_bytes = min(formats.PIECE_BYTES, self._shard_bytes)
    for item in formats.pieces(path, rules.text_field, piece_bytes):
      if isinstance(item, formats.Problem):
        Problems(rules.on_error).add(item)  # raises unless on_error is skip
        self._problems.append(item)
        continue
      self._stored += item.read - read
      read = item.read
      self._add(item)
      if self._size >= self._shard_bytes:
        yield from self.end_chunk()

  def _add(self, piece: formats.Piece) -> None:
    self._pieces.append((piece.path, piece.first, len(piece.data)))
    self._size += len(piece.data)
    if not self._complete:
      self._open().write(piece.data)

  def end_chunk(self) -> Iterator[Task]:
    if self._pieces or self._problems:
      chunk = None
      if not self._complete:
        self._open().close()
        chunk = Chunk(self._directory, self._split, tuple(self._pieces), tuple(self._problems))
      yield chunk, self._stored
      self.count += 1
      self._begin()

  def _open(self) -> IO[bytes]:
    if self._input is None:
      self._directory.mkdir()
      self._input = open(self._directory / INPUT, "wb")
    return self._input
