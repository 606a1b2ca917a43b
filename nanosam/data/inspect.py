"""Describes a data source: its size, what it looks like, how fast it is read.

    python -m nanosam.data.inspect --source=tokens:DIR [--weights=FILE]
      [--config=configs/FILE.py[:k=v,...]]

With a config: in rows of its length, and how many epochs its run takes; --source defaults to the
config's own. With weights: of the epochs that they make. --verify reads all of a token store and
compares checksums.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from nanosam import config as config_lib
from nanosam.data.batch import StreamOptions, batch_hash
from nanosam.data.preparation.assembly import PLAN
from nanosam.data.sources import SETTINGS, TextSource, source_of, text_of
from nanosam.data.store import StoreReader, check_sha256
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import need

_SECONDS = 2.0  # of measuring throughput


def main(argv: list[str]) -> None:
  a = parse(argv[1:])
  need(a.source or a.config, "nothing to inspect: pass --source=tokens:DIR or --config=FILE.py")
  for key, low in {"length": 1, "batch_size": 1, "workers": 0, "rows": 0}.items():
    value = getattr(a, key)
    need(value is None or value >= low, f"--{key}={value} must be at least {low}")
  config = config_lib.load(a.config) if a.config else config_lib.default()
  name = a.source or config.data.source
  config.data.update({k: v for k in SETTINGS if (v := getattr(a, k, None)) is not None})
  config.data.update(source=name, weights=a.weights or ("" if a.source else config.data.weights))
  source = text_of(source_of(config.data), name)
  if a.verify:
    verify(name)
  L, batch_size = a.length or config.model.L, a.batch_size or config.batch_size
  facts = inspect(source, name, L=L, batch_size=batch_size, workers=a.workers, rows=a.rows)
  if a.config:
    tokens = config.opt.num_train_steps * batch_size * L
    facts["config_tokens"] = tokens
    facts["config_epochs"] = tokens / source.train_tokens
  print(json.dumps(facts) if a.json else describe(facts))


def parse(argv: Sequence[str]) -> argparse.Namespace:
  p = Parser("python -m nanosam.data.inspect", "Describes a data source.")
  p.add_argument("--source", help="embedded, tokens:DIR, text:FILE, tfds:NAME or tfds:DIR")
  p.add_argument("--config", help="FILE.py[:k=v,...]")
  p.add_argument("--weights", default="", help="data.weights (default: the config's)")
  p.add_argument("--length", type=int, help="of a row (default: the config's)")
  p.add_argument("--batch_size", type=int, help="in rows (default: the config's)")
  p.add_argument("--vocab_size", type=int, help="of embedded")
  p.add_argument("--cache_dir", help="for copies and the embedded corpus")
  p.add_argument("--data_dir", help="directory of tfds:NAME")
  p.add_argument("--tokenizer", help="for text and tfds")
  p.add_argument("--text_field", help="for text and tfds")
  p.add_argument("--border", help="for text: what ends a document")
  p.add_argument("--workers", type=int, default=0, help="reading processes (%(default)s)")
  p.add_argument("--rows", type=int, default=5, help="to show (%(default)s)")
  p.add_argument("--verify", action="store_true", help="compare checksums of a token store")
  p.add_argument("--json", action="store_true")
  return p.parse_args(argv)


def inspect(
  source: TextSource, name: str, *, L: int, batch_size: int, workers: int, rows: int
) -> dict[str, Any]:
  """Facts about a source, for JSON."""
  stream = source.train_stream(StreamOptions(L, batch_size, range(batch_size), workers=workers))
  try:
    first = next(stream)
    started, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < _SECONDS:
      next(stream)
      steps += 1
  finally:
    stream.close()
  return {
    "source": name,
    "fingerprint": source.fingerprint,
    **({"weights": source.weights.summary()} if source.weights else {}),
    "is_estimate": name.startswith("tfds:"),
    "documents": source.train_documents,
    "tokens": source.train_tokens,
    "bytes": source.train_bytes,
    "bytes_per_token": source.train_bytes / source.train_tokens,
    "tokens_per_document": source.train_tokens / source.train_documents,
    "vocab_size": source.tokenizer.vocab_size,
    "batch_size": batch_size,
    "length": L,
    "tokens_per_sec": steps * batch_size * L / seconds,
    "first_batch_hash": batch_hash(first),
    "rows": [source.tokenizer.decode(row) for row in first.inputs[:rows]],
  }


def describe(facts: dict[str, Any]) -> str:
  about = "about " if facts["is_estimate"] else ""
  lines = [f"{facts['source']}  ({facts['fingerprint']})"]
  if w := facts.get("weights"):
    lines.append(
      f"  weights     {w['choose']} documents {w['copies']} times an epoch, by {w['feature']} "
      f"({w['hash']}): what follows is of such an epoch"
    )
  lines += [
    f"  documents   {facts['documents']:,}, of {facts['tokens_per_document']:,.1f} tokens",
    f"  tokens      {about}{facts['tokens']:,} of a vocabulary of {facts['vocab_size']:,}",
    f"  bytes       {about}{facts['bytes']:,}, {facts['bytes_per_token']:.3f} a token",
    f"  throughput  {facts['tokens_per_sec'] / 1e6:.2f} million tokens/s in batches of "
    f"{facts['batch_size']} x {facts['length']}",
  ]
  if "config_epochs" in facts:
    tokens = facts["config_tokens"]
    lines.append(f"  the config  {tokens:,} tokens, {facts['config_epochs']:.3f} epochs")
  lines.append(f"  first batch of data_seed 0 ({facts['first_batch_hash']}) begins")
  lines += [f"    {json.dumps(row[:150], ensure_ascii=False)}" for row in facts["rows"]]
  return "\n".join(lines)


def verify(name: str) -> None:
  """Compares all checksums of a token store, and of the texts that `prepare` stored with it."""
  kind, _, directory = name.partition(":")
  need(kind == "tokens", "--verify is for token stores: tokens:DIR")
  store = StoreReader(directory)
  store.verify()
  plan = store.directory / PLAN
  if plan.exists():
    for file, sha256 in json.loads(plan.read_bytes())["text_sha256"].items():
      check_sha256(store.directory / file, sha256)


if __name__ == "__main__":
  errors.run(main)
