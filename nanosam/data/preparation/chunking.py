"""Divides the input files into chunks on disk, without parsing them: work for the workers.

Chunk 12 of group 3 of the input files is the directory 00003-00012 (see worker.py), and
group-00003.json holds the number of chunks in that group.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nanosam.data.preparation import formats
from nanosam.data.preparation.inputs import Plan
from nanosam.data.preparation.worker import INPUT, RECORD, Chunk, Rules
from nanosam.system.files import write_json

# A chunk, or None if it is complete already; and how many bytes of the input files it covers.
Task = tuple[Chunk | None, int]


def make_chunks(folder: Path, plan: Plan, rules: Rules) -> Iterator[Task]:
  """All chunks in order, with their raw input on disk. Groups that are complete are not read."""
  for g, group in enumerate(plan.groups):
    if _group_file(folder, g).exists() and all(map(_is_complete, chunk_directories(folder, g))):
      yield None, sum(plan.inputs[i].bytes for i in group)
    else:
      yield from _divide(folder, g, plan, rules)


def _divide(folder: Path, g: int, plan: Plan, rules: Rules) -> Iterator[Task]:
  """Writes pieces of a group's files to disk until they fill a chunk, chunk by chunk."""
  split = plan.inputs[plan.groups[g][0]].split
  items = _items(plan.paths(plan.groups[g]), rules, min(formats.PIECE_BYTES, plan.shard_bytes))
  count = 0
  for first in items:
    directory = _chunk_directory(folder, g, count)
    complete = _is_complete(directory)
    if not complete:
      shutil.rmtree(directory, ignore_errors=True)
      directory.mkdir()
    pieces, problems, size, stored = [], [], 0, 0
    with open(os.devnull if complete else directory / INPUT, "wb") as f:
      for item, more in itertools.chain([first], items):
        stored += more
        if isinstance(item, formats.Problem):
          problems.append(item)
          continue
        f.write(item.data)
        pieces.append((item.path, item.first, len(item.data)))
        size += len(item.data)
        if size >= plan.shard_bytes:
          break
    chunk = None if complete else Chunk(directory, split, tuple(pieces), tuple(problems))
    yield chunk, stored
    count += 1
  write_json(_group_file(folder, g), {"chunks": count})


def _items(
  paths: list[str], rules: Rules, piece_bytes: int
) -> Iterator[tuple[formats.Piece | formats.Problem, int]]:
  """Pieces and problems, and how many more bytes of their file were read for each."""
  for path in paths:
    before = 0
    for item in rules.pieces(path, piece_bytes=piece_bytes):
      read = before if isinstance(item, formats.Problem) else item.read
      yield item, read - before
      before = read


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
