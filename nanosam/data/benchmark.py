"""How fast the data path is: `prepare`, and reading batches, against SentencePiece itself.

`main` is the `data` part of scripts/benchmark.py. Everything is measured in turn and repeated, so
that a machine which others use too slows all rows alike. `ratio` is the speed in tokens relative to
SentencePiece's own batch encoding of the same text, with as many threads as `prepare` has workers.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import sentencepiece

from nanosam.data import embedded
from nanosam.data.batch import StreamOptions
from nanosam.data.preparation import formats
from nanosam.data.preparation.inputs import expand
from nanosam.data.sources import open_source
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError

_BATCH_SIZE, _LENGTH = 256, 512
_BATCHES = {"tokens": 100, "tfds": 10}
_WATCH_SECONDS = 0.05


def main(argv: list[str]) -> None:
  p = Parser("scripts/benchmark.py data", "Measures the data path.")
  p.add_argument("--input", metavar="GLOB", help="files of text; none: the embedded corpus")
  p.add_argument("--tokenizer", metavar="FILE", help="with --input")
  p.add_argument("--text_field", default="text")
  p.add_argument("--workers", type=int, default=2)
  p.add_argument("--repeats", type=int, default=3)
  p.add_argument("--json", action="store_true")
  a = p.parse_args(argv[1:])
  if bool(a.input) != bool(a.tokenizer):
    p.error("--input and --tokenizer go together")
  with tempfile.TemporaryDirectory() as scratch:
    if not a.input:
      a.input, a.tokenizer = _embedded(Path(scratch))
    bench = Bench(Path(scratch), a.input, a.tokenizer, a.text_field, a.workers)
    rows = bench.run(a.repeats)
  print(json.dumps(rows, indent=1) if a.json else _table(rows))


def _embedded(scratch: Path) -> tuple[str, str]:
  """The embedded corpus as a file, and a vocabulary for it."""
  documents = embedded.collect_documents()
  lines = [json.dumps({"text": d}) for d in documents]
  (scratch / "corpus.jsonl").write_text("\n".join(lines))
  tokenizer = train_tokenizer(documents[:400], 4096, "unigram")
  (scratch / "tokenizer.model").write_bytes(tokenizer.model_bytes)
  return str(scratch / "corpus.jsonl"), str(scratch / "tokenizer.model")


class Bench:
  """What is measured; each method returns seconds."""

  def __init__(self, scratch: Path, pattern: str, tokenizer: str, text_field: str, workers: int):
    self._scratch, self._tokenizer, self._workers = scratch, tokenizer, workers
    self._text_field = text_field
    self._files = expand(pattern)
    self._texts = [
      item.text
      for path in self._files
      for piece in formats.pieces(path, text_field)
      if isinstance(piece, formats.Piece)
      for item in formats.documents(piece, text_field)
      if isinstance(item, formats.Document)
    ]
    self._model = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    self._num_bytes = sum(len(t.encode()) for t in self._texts)
    self._num_tokens = sum(len(ids) for ids in self._model.encode(self._texts))
    self._stores: list[Path] = []
    self._peak_bytes = 0

  def run(self, repeats: int) -> list[dict[str, Any]]:
    """Rows of name, seconds, tokens_per_sec, ratio; medians over the repeats."""
    n = self._workers
    text, batch = self._num_tokens, _BATCH_SIZE * _LENGTH
    work: dict[str, tuple[Callable[[], float], int]] = {
      "sentencepiece": (self._encode, text),
      "prepare": (self._prepare, text),
      "tokens": (lambda: self._read("tokens", 0), _BATCHES["tokens"] * batch),
      f"tokens, {n} workers": (lambda: self._read("tokens", n), _BATCHES["tokens"] * batch),
      "tfds": (lambda: self._read("tfds", 0), _BATCHES["tfds"] * batch),
      f"tfds, {n} workers": (lambda: self._read("tfds", n), _BATCHES["tfds"] * batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
      for name, (measure, _) in work.items():
        seconds[name].append(measure())
    rows: list[dict[str, Any]] = []
    for name, (_, tokens) in work.items():
      times = zip(seconds[name], seconds["sentencepiece"], strict=True)
      middle = statistics.median(seconds[name])
      ratio = statistics.median(tokens / t / (text / base) for t, base in times)
      row = {"name": name, "seconds": middle, "tokens_per_sec": tokens / middle, "ratio": ratio}
      rows.append(row)
    rows[0]["text_bytes_per_sec"] = self._num_bytes / rows[0]["seconds"]
    rows[1]["text_bytes_per_sec"] = self._num_bytes / rows[1]["seconds"]
    rows[1]["peak_bytes"] = self._peak_bytes
    return rows

  def _encode(self) -> float:
    started = time.perf_counter()
    self._model.encode(self._texts, num_threads=self._workers)
    return time.perf_counter() - started

  def _prepare(self) -> float:
    """The whole command, from the start of Python to its end."""
    self._stores.append(self._scratch / f"store{len(self._stores)}")
    command = [sys.executable, "-m", "nanosam.data.prepare", "--input", *self._files]
    command += [f"--tokenizer={self._tokenizer}", f"--text_field={self._text_field}"]
    command += [f"--workers={self._workers}", f"--output={self._stores[-1]}"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
      self._peak_bytes = max(self._peak_bytes, tree_bytes(process.pid))
      time.sleep(_WATCH_SECONDS)
    if process.returncode:
      raise UserError("prepare failed, so there is nothing to measure")
    return time.perf_counter() - started

  def _read(self, kind: str, workers: int) -> float:
    source = open_source(f"{kind}:{self._stores[0]}", vocab_size=0, cache_dir="")
    everything = range(_BATCH_SIZE)
    stream = source.train_stream(StreamOptions(_LENGTH, _BATCH_SIZE, everything, workers=workers))
    next(stream)  # with the workers' start
    started = time.perf_counter()
    for _ in range(_BATCHES[kind]):
      next(stream)
    seconds = time.perf_counter() - started
    stream.close()
    return seconds


def tree_bytes(pid: int) -> int:
  """Resident memory of a process and all below it; what they share counts several times."""
  total = 0
  try:
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
      total += process.memory_info().rss
  except psutil.Error:  # one ended meanwhile
    pass
  return total


def _table(rows: list[dict[str, Any]]) -> str:
  lines = [f"{'':<20}{'seconds':>9}{'M tokens/s':>12}{'ratio':>8}"]
  for row in rows:
    line = f"{row['name']:<20}{row['seconds']:>9.2f}{row['tokens_per_sec'] / 1e6:>12.2f}"
    line += f"{row['ratio']:>8.2f}"
    if "text_bytes_per_sec" in row:
      line += f"  {row['text_bytes_per_sec'] / 1e6:.1f} MB/s of text"
    if "peak_bytes" in row:
      line += f", {row['peak_bytes'] / 2**20:.0f} MiB at most"
    lines.append(line)
  return "\n".join(lines)
