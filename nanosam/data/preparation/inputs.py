"""Which files `prepare` reads, in which order, and how they are grouped."""

import dataclasses
import glob
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from nanosam.data.preparation import formats, vocabulary
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UsageError, say
from nanosam.system.remote import storage_errors

FORMAT = 1
_SHARDS = 256  # the target, within the limits below
_MIN_SHARD_BYTES, _MAX_SHARD_BYTES = 4 << 20, 256 << 20
_COMPRESSION = 3  # typical of text


@dataclasses.dataclass(frozen=True)
class Arguments:
  """What `prepare` was asked to do."""

  input: Sequence[str]  # patterns and folders
  output: str
  vocab_size: int = 32_000
  may_be_smaller: bool = True  # the vocabulary, if the text is too small for it
  tokenizer: str | None = None
  model_type: str = "unigram"
  sample_bytes: int = 20_000_000
  text_field: str = "text"
  border: str = formats.WHOLE_FILE
  validation: Sequence[str] = ()
  validation_fraction: float | None = None  # None: 0.01 of the documents, or 0.1 of a lone one
  on_error: str = "fail"
  workers: int = 1
  shard_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Input:
  path: str
  bytes: int
  modified: float
  split: str | None  # None: decided per document


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything that decides the result; stored in prepare.json from the start."""

  arguments: dict[str, Any]
  inputs: list[Input]
  groups: list[list[int]]  # consecutive inputs of one split, divided into chunks as if one file
  shard_bytes: int  # raw input in a chunk

  def paths(self, group: list[int]) -> list[str]:
    return [self.inputs[i].path for i in group]

  def to_json(self) -> dict[str, Any]:
    return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))


def make_plan(a: Arguments) -> Plan:
  """The plan for prepare's arguments."""
  validation = {p: "validation" for pattern in a.validation for p in expand(pattern)}
  rest = "train" if validation else None
  found = {p: rest for pattern in a.input for p in expand(pattern)} | validation
  if set(found) == set(validation):
    raise UsageError("every input file is for validation; name training files with --input")
  inputs = []
  for path, split in sorted(found.items()):
    formats.kind_of(path)
    stat = epath.Path(path).stat()
    inputs.append(Input(path, stat.length, stat.mtime, split))
  total = sum(i.bytes for i in inputs)
  guess = min(max(total * _COMPRESSION // _SHARDS, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
  shard_bytes = a.shard_bytes or guess
  tokenizer = Tokenizer.load(a.tokenizer).sha256 if a.tokenizer else None
  arguments = {
    "tokenizer": tokenizer,
    **{k: None if tokenizer else getattr(a, k) for k in vocabulary.SETTINGS},
    "text_field": a.text_field,
    "validation_fraction": validation_fraction(a),
    **{k: getattr(a, k) for k in ("shard_bytes", "on_error")},
    **({"border": a.border} if a.border != formats.WHOLE_FILE else {}),
  }
  return Plan(arguments, inputs, _grouped(inputs, shard_bytes), shard_bytes)


def validation_fraction(a: Arguments) -> float:
  """Of the documents that belong to no split."""
  if a.validation_fraction is None:
    return 0.0 if a.validation else 0.01
  return a.validation_fraction


def expand(pattern: str) -> list[str]:
  """The files that match, local or remote, or all files of text in a local folder."""
  if os.path.isdir(folder := os.path.expanduser(pattern)):
    return _files_in(os.path.abspath(folder))
  if "://" in pattern:
    scheme, _, rest = pattern.partition("://")
    bucket, _, tail = rest.partition("/")
    with storage_errors(pattern):
      found = [os.fspath(p) for p in epath.Path(f"{scheme}://{bucket}").glob(tail)]
  else:
    found = [os.path.abspath(p) for p in glob.glob(os.path.expanduser(pattern), recursive=True)]
    found = [p for p in found if os.path.isfile(p)]
  if not found:
    raise UsageError(f"no file matches {pattern}; check the path, and quote patterns")
  return found


def _files_in(folder: str) -> list[str]:
  """Hidden files and folders are left out."""
  every = [
    os.path.join(parent, name)
    for parent, folders, names in os.walk(folder)
    if not folders.sort() and not re.search(r"/\.", parent[len(folder) :])
    for name in sorted(names)
    if not name.startswith(".")
  ]
  if found := [path for path in every if formats.is_known(path)]:
    if others := [path for path in every if path not in found]:
      more = f" and {len(others) - 1} more" if len(others) > 1 else ""
      say(f"not text, left out: {others[0]}{more}; {formats.KNOWN}")
    return found
  holds = f"{len(every)} others, such as {os.path.basename(every[0])}" if every else "none at all"
  raise UsageError(f"{folder} has no files of text ({holds}); {formats.KNOWN}")


def _grouped(inputs: list[Input], shard_bytes: int) -> list[list[int]]:
  """Small files share a group, so that no shard is tiny; a large file has its own."""
  groups: list[list[int]] = []
  size = 0
  for i, file in enumerate(inputs):
    if not groups or size >= shard_bytes or file.split != inputs[groups[-1][0]].split:
      groups.append([])
      size = 0
    groups[-1].append(i)
    size += file.bytes
  return groups


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """The differences between two plans in JSON form, except for sizes and times of files."""
  if old.get("format") != FORMAT:
    return [f"format: {old.get('format')} -> {FORMAT}"]
  defaults = {"border": formats.WHOLE_FILE}  # recorded only if it is something else
  a, b = {**defaults, **old["arguments"]}, {**defaults, **new["arguments"]}
  if b["on_error"] == "skip":
    a["on_error"] = "skip"  # chunks made under `fail` had nothing to skip
  found = [f"{key}: {a.get(key)} -> {b[key]}" for key in b if a.get(key) != b[key]]
  before, after = ({(i["path"], i["split"]) for i in plan["inputs"]} for plan in (old, new))
  for names, files in (("without", before - after), ("now with", after - before)):
    if files:
      more = f" and {len(files) - 1} more" if len(files) > 1 else ""
      found.append(f"{names} {min(path for path, _ in files)}{more}")
  return found
