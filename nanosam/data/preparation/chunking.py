"""Cuts input files into chunks on disk, without parsing them: what one process feeds many with.

Chunk 12 of group 3 of the input files is the directory 00003-00012 (see chunk.py), and
group-00003.json says into how many chunks that group was cut.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from nanosam.data.preparation import formats
from nanosam.data.preparation.chunk import INPUT, RECORD, Chunk, Problems, Rules
from nanosam.data.preparation.inputs import Plan
from nanosam.system.files import write_json


class Cut(NamedTuple):
  chunk: Chunk | None  # None if it was made before
  stored_bytes: int  # of the input files that it accounts for


def cut_chunks(folder: Path, plan: Plan, rules: Rules) -> Iterator[Cut]:
  """All chunks in order, each with its raw input in place. Groups made before are not read."""
  for g, group in enumerate(plan.groups):
    if _group_file(folder, g).exists() and all(map(is_made, chunk_directories(folder, g))):
      yield Cut(None, sum(plan.inputs[i].bytes for i in group))
      continue
    cutter = _Cutter(folder, g, plan.inputs[group[0]].split, plan.shard_bytes)
    for path in plan.paths(group):
      yield from cutter.cut_file(path, rules)
    yield from cutter.end_chunk()
    write_json(_group_file(folder, g), {"chunks": cutter.count})


def chunk_directories(folder: Path, group: int) -> list[Path]:
  """Where the chunks of a group are that was cut to the end."""
  count = json.loads(_group_file(folder, group).read_bytes())["chunks"]
  return [_chunk_directory(folder, group, i) for i in range(count)]


def drop_group(folder: Path, group: int) -> None:
  _group_file(folder, group).unlink(missing_ok=True)
  for directory in folder.glob(f"{group:05d}-*"):
    shutil.rmtree(directory)


def is_made(directory: Path) -> bool:
  return (directory / RECORD).exists()


def _group_file(folder: Path, group: int) -> Path:
  return folder / f"group-{group:05d}.json"


def _chunk_directory(folder: Path, group: int, number: int) -> Path:
  return folder / f"{group:05d}-{number:05d}"


class _Cutter:
  """Gathers pieces on disk until they make a chunk."""

  def __init__(self, folder: Path, group: int, split: str | None, shard_bytes: int):
    self._folder, self._group, self._split = folder, group, split
    self._shard_bytes = shard_bytes
    self.count = 0
    self._begin()

  def _begin(self) -> None:
    self._directory = _chunk_directory(self._folder, self._group, self.count)
    self._made = is_made(self._directory)
    if not self._made:
      shutil.rmtree(self._directory, ignore_errors=True)  # half of one
    self._pieces: list[tuple[str, int, int]] = []
    self._problems: list[formats.Problem] = []
    self._size = self._stored = 0
    self._input: IO[bytes] | None = None

  def cut_file(self, path: str, rules: Rules) -> Iterator[Cut]:
    read = 0
    piece_bytes = min(formats.PIECE_BYTES, self._shard_bytes)
    for item in formats.pieces(path, rules.text_field, piece_bytes):
      if isinstance(item, formats.Problem):
        Problems(rules.on_error).add(item)  # raises unless problems are to be skipped
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
    if not self._made:
      self._open().write(piece.data)

  def end_chunk(self) -> Iterator[Cut]:
    if self._pieces or self._problems:
      chunk = None
      if not self._made:
        self._open().close()
        chunk = Chunk(self._directory, self._split, tuple(self._pieces), tuple(self._problems))
      yield Cut(chunk, self._stored)
      self.count += 1
      self._begin()

  def _open(self) -> IO[bytes]:
    if self._input is None:
      self._directory.mkdir()
      self._input = open(self._directory / INPUT, "wb")
    return self._input
