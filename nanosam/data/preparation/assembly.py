"""The last part of `prepare`: moves the shards of all chunks into place and describes them."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from nanosam.data.preparation.chunking import chunk_directories
from nanosam.data.preparation.worker import RECORD, SHOWN_PROBLEMS, TEXT_FIELD
from nanosam.data.store import TEXT, TOKENIZER, Shard, StoreWriter
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError
from nanosam.system.files import write_json

PLAN = "prepare.json"
SPLITS = ("train", "validation")


class _Chunks(NamedTuple):
  """The records of all chunks together."""

  shards: dict[str, list[tuple[Path, dict[str, Any]]]]  # directory and record of each, by split
  skipped: int
  first_skipped: list[str]


def assemble(out: Path, unfinished: Path, groups: int) -> dict[str, Any]:
  """Returns the final contents of prepare.json. Can be repeated if it is interrupted."""
  chunks = _read_records(unfinished, groups)
  _check_splits(out, chunks)
  shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
  text_sha256: dict[str, str] = {}
  (out / TEXT).mkdir(parents=True, exist_ok=True)
  for split, found in chunks.shards.items():
    for number, (directory, shard) in enumerate(found):
      name = f"{split}-{number:05d}"
      text = f"{TEXT}/text-{split}.array_record-{number:05d}-of-{len(found):05d}"
      _move(directory / f"{split}-00000.array_record", out / text)
      for suffix in ("documents", "tokens"):
        _move(directory / f"{split}-00000.{suffix}", out / f"{name}.{suffix}")
      shards[split].append(Shard(**{**shard["tokens"], "name": name}))
      text_sha256[text] = shard["text_sha256"]
  _write_tfds_metadata(out / TEXT, shards)
  tokenizer = Tokenizer.load(out / TOKENIZER)
  summary = {
    **{split: _totals(found) for split, found in shards.items()},
    "vocab_size": tokenizer.vocab_size,
    "skipped": chunks.skipped,
    "first_skipped": chunks.first_skipped,
  }
  record = json.loads((out / PLAN).read_bytes())
  record |= {"summary": summary, "text_sha256": text_sha256}
  write_json(out / PLAN, record)
  StoreWriter(out, tokenizer).commit(shards)
  shutil.rmtree(unfinished)
  return record


def _read_records(unfinished: Path, groups: int) -> _Chunks:
  shards: dict[str, list[tuple[Path, dict[str, Any]]]] = {split: [] for split in SPLITS}
  skipped, first_skipped = 0, []
  for directory in (d for g in range(groups) for d in chunk_directories(unfinished, g)):
    record = json.loads((directory / RECORD).read_bytes())
    skipped += record["skipped"]
    first_skipped += record["first_skipped"]
    for split, shard in record["splits"].items():
      shards[split].append((directory, shard))
  return _Chunks(shards, skipped, first_skipped[:SHOWN_PROBLEMS])


def _check_splits(out: Path, chunks: _Chunks) -> None:
  if not chunks.shards["train"]:
    first = f" ({chunks.first_skipped[0]})" if chunks.first_skipped else ""
    raise UserError(f"there are no documents to train on{first}; delete {out} and use other files")
  if not chunks.shards["validation"]:
    raise UserError(
      f"there are no validation documents; delete {out} and raise --validation_fraction, or name "
      "files with --validation"
    )


def _move(source: Path, target: Path) -> None:
  if source.exists():
    source.replace(target)
  elif not target.exists():
    raise UserError(f"{source} is missing; delete {target.parent} and start over")


def _totals(shards: list[Shard]) -> dict[str, int]:
  return {
    "documents": sum(s.documents for s in shards),
    "tokens": sum(s.tokens for s in shards),
    "bytes": sum(s.bytes for s in shards),
    "shards": len(shards),
  }


def _write_tfds_metadata(directory: Path, shards: dict[str, list[Shard]]) -> None:
  """The two files that tfds.builder_from_directory needs, written without importing TFDS."""
  splits = [
    {
      "name": split,
      "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
      "numBytes": str(sum(s.bytes for s in found)),
      "shardLengths": [str(s.documents) for s in found],
    }
    for split, found in shards.items()
  ]
  info = {"name": "text", "version": "1.0.0", "fileFormat": "array_record", "splits": splits}
  package = "tensorflow_datasets.core.features"
  features = {
    "pythonClassName": f"{package}.features_dict.FeaturesDict",
    "featuresDict": {
      "features": {TEXT_FIELD: {"pythonClassName": f"{package}.text_feature.Text", "text": {}}}
    },
  }
  write_json(directory / "features.json", features)
  write_json(directory / "dataset_info.json", info)


def describe(out: Path, summary: dict[str, Any]) -> str:
  lines = []
  for split in SPLITS:
    s = summary[split]
    lines.append(
      f"  {split:<11}{s['documents']:,} documents, {s['tokens']:,} tokens, {s['bytes']:,} bytes, "
      f"{s['bytes'] / s['tokens']:.3f} bytes per token, {s['shards']} shards"
    )
  lines.append(f"  vocabulary {summary['vocab_size']:,} pieces")
  lines.append(f"  skipped    {summary['skipped']:,} documents")
  lines += [f"    {problem}" for problem in summary["first_skipped"]]
  lines.append(f"  train with --config.data.source=tokens:{out}")
  return "\n".join(lines)
