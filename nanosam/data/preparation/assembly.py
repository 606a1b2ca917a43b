"""The last part of `prepare`: moves the shards of all chunks into place and describes them."""

import json
import shutil
from pathlib import Path
from typing import Any

from nanosam.data.preparation.chunking import chunk_directories
from nanosam.data.preparation.worker import RECORD, SHOWN_PROBLEMS, SPLITS, TEXT_FIELD
from nanosam.data.store import TEXT, TOKENIZER, Shard, StoreWriter
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError
from nanosam.system.files import write_json

PLAN = "prepare.json"


def assemble(out: Path, unfinished: Path, groups: int) -> dict[str, Any]:
  """Returns the final contents of prepare.json. Can be repeated if it is interrupted."""
  directories = [d for g in range(groups) for d in chunk_directories(unfinished, g)]
  chunks = [(d, json.loads((d / RECORD).read_bytes())) for d in directories]
  first_skipped = [problem for _, c in chunks for problem in c["first_skipped"]][:SHOWN_PROBLEMS]
  if not any("train" in c["splits"] for _, c in chunks):
    first = f" ({first_skipped[0]})" if first_skipped else ""
    raise UserError(f"there are no documents to train on{first}; delete {out} and use other files")
  if not any("validation" in c["splits"] for _, c in chunks):
    raise UserError(
      f"there are no validation documents; delete {out} and raise --validation_fraction, or name "
      "files with --validation"
    )
  shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
  text_sha256: dict[str, str] = {}
  (out / TEXT).mkdir(parents=True, exist_ok=True)
  for split in SPLITS:
    found = [(d, c["splits"][split]) for d, c in chunks if split in c["splits"]]
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
    "skipped": sum(c["skipped"] for _, c in chunks),
    "first_skipped": first_skipped,
  }
  record = json.loads((out / PLAN).read_bytes())
  record |= {"summary": summary, "text_sha256": text_sha256}
  write_json(out / PLAN, record)
  StoreWriter(out, tokenizer).commit(shards)
  shutil.rmtree(unfinished)
  return record


def _move(source: Path, target: Path) -> None:
  if source.exists():
    source.replace(target)
  elif not target.exists():
    raise UserError(f"{source} is missing; delete {target.parent} and start over")


def _totals(shards: list[Shard]) -> dict[str, int]:
  totals = {key: sum(getattr(s, key) for s in shards) for key in ("documents", "tokens", "bytes")}
  return {**totals, "shards": len(shards)}


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
