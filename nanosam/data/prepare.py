"""Turns files of text into a token store and a TFDS data set, without TensorFlow or Beam.

    python -m nanosam.data.prepare --input='c4/*.json.gz' --output=DIR --vocab_size=32000

Reads JSON lines, Parquet, TFRecord (tf.Example) and text (one document per file), plain or gzipped.
The same files and arguments give the same bytes, whatever the number of workers. After being
killed, the same command resumes and keeps the shards that are complete. In the end DIR holds

    store.json, tokenizer.model, train-00000.tokens, ...   the token store: data.source=tokens:DIR
    text/1.0.0/                  the texts in ArrayRecord form: tfds.builder_from_directory, or
                                 data.source=tfds:DIR, tokenised again on the fly
    prepare.json                 arguments, input files, summary, checksums of text/

and until then the chunks of the input files in unfinished/ (see chunking.py and worker.py).
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from nanosam.data.preparation import vocabulary, worker
from nanosam.data.preparation.assembly import PLAN, assemble, describe
from nanosam.data.preparation.chunking import delete_group, make_chunks
from nanosam.data.preparation.inputs import Plan, changes, make_plan
from nanosam.data.preparation.worker import Rules
from nanosam.data.store import MANIFEST, TOKENIZER
from nanosam.data.tokenizer import MODEL_TYPES, Tokenizer
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import Interrupted, UsageError, UserError, need
from nanosam.system.files import PARTIAL, disk_errors, lock_file, write_atomically, write_json
from nanosam.system.progress import Progress

_UNFINISHED = "unfinished"
_COMPLETE = "complete.json"  # all chunks are there and are being moved into place
_POLL_SECONDS = 0.5


def main(argv: list[str]) -> None:
  prepare(parse(argv[1:]))


def prepare(a: argparse.Namespace) -> dict[str, Any]:
  """Prepares everything, or what is left to do; returns the summary."""
  out = Path(a.output).expanduser()
  plan = make_plan(a)
  lock = _lock(out)
  try:
    record = _start_or_resume(out, plan)
    if (out / MANIFEST).exists():
      shutil.rmtree(out / _UNFINISHED, ignore_errors=True)
      print(f"{out} is already prepared")
    else:
      record = _run(out, _recorded_plan(out, plan, record), a)
  finally:
    os.close(lock)
  print(describe(out, record["summary"]))
  return record["summary"]


def _run(out: Path, plan: Plan, a: argparse.Namespace) -> dict[str, Any]:
  started = time.monotonic()
  rules = Rules(a.text_field, a.validation_fraction, a.on_error)
  with disk_errors(out):
    _process_chunks(out / _UNFINISHED, plan, rules, _vocabulary(out, plan, rules, a), a.workers)
    record = assemble(out, out / _UNFINISHED, len(plan.groups))
  print(f"prepared {out} in {time.monotonic() - started:.1f} s")
  return record


def parse(argv: Sequence[str]) -> argparse.Namespace:
  what = "Turns files of text into a token store and a TFDS data set."
  p = Parser("python -m nanosam.data.prepare", what)
  many: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "GLOB"}
  add = p.add_argument
  add("--input", required=True, help="files of documents; gs:// too", **many)
  add("--output", required=True, metavar="DIR", help="local directory for the result")
  vocab = p.add_mutually_exclusive_group()
  vocab.add_argument("--vocab_size", type=int, default=32_000, help="pieces to train (%(default)s)")
  vocab.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model to use instead")
  add("--model_type", choices=MODEL_TYPES, default="unigram", help="(%(default)s)")
  add("--sample_bytes", type=int, default=20_000_000, help="text to train on (%(default)s)")
  add("--text_field", default="text", help="field or column (%(default)s)")
  add("--validation", help="files for validation alone", **many)
  add("--validation_fraction", type=float, help="of the documents, without --validation (0.01)")
  add("--on_error", choices=("fail", "skip"), default="fail", help="(%(default)s)")
  add("--workers", type=int, default=_cores(), help="processes (all cores)")
  add("--shard_bytes", type=int, default=0, help="raw text in a shard; 0 = by the input's size")
  a = p.parse_args(argv)
  if a.validation_fraction is None:
    a.validation_fraction = 0.0 if a.validation else 0.01
  fraction = a.validation_fraction
  need(not (a.validation and fraction), "--validation and --validation_fraction exclude each other")
  need(a.validation or 0 < fraction < 1, f"--validation_fraction={fraction}: not in (0, 1)")
  need(a.workers >= 1, f"--workers={a.workers}: at least 1")
  need(a.shard_bytes >= 0, f"--shard_bytes={a.shard_bytes}: at least 0")
  need(a.sample_bytes >= 1, f"--sample_bytes={a.sample_bytes}: at least 1")
  need("://" not in a.output, f"--output={a.output}: must be local; copy the result afterwards")
  return a


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lock(out: Path) -> int:
  try:
    out.mkdir(parents=True, exist_ok=True)
    return lock_file(out)
  except BlockingIOError as e:
    raise UserError(f"another process is preparing {out}; wait for it or stop it") from e
  except OSError as e:
    raise UserError(f"cannot write to {out}: {e.strerror}; choose another --output") from e


def _start_or_resume(out: Path, plan: Plan) -> dict[str, Any]:
  """The contents of prepare.json; refuses a directory with other arguments or other files."""
  new = plan.to_json()
  if not (out / PLAN).exists():
    leftovers = (_UNFINISHED, PLAN + PARTIAL)  # of a run that was killed right here
    if any(p.name not in leftovers for p in out.iterdir()):
      raise UsageError(
        f"{out} is not empty and was not made by this command; choose another --output"
      )
    (out / _UNFINISHED).mkdir(exist_ok=True)
    write_json(out / PLAN, new)
    return new
  try:
    record = json.loads((out / PLAN).read_bytes())
  except ValueError as e:
    raise UserError(f"{out / PLAN} is damaged ({e}); delete {out} and start over") from e
  if found := changes(record, new):
    raise UsageError(
      f"{out} was started with other arguments ({'; '.join(found)}); use those, choose another "
      "--output, or delete it"
    )
  if record["arguments"] != new["arguments"]:
    record["arguments"] = new["arguments"]
    write_json(out / PLAN, record)
  return record


def _recorded_plan(out: Path, plan: Plan, record: dict[str, Any]) -> Plan:
  """The plan that was started; deletes the chunks of files that have changed since."""
  recorded = dataclasses.replace(plan, groups=record["groups"], shard_bytes=record["shard_bytes"])
  before = {i["path"]: i for i in record["inputs"]}
  changed = {i.path for i in plan.inputs if before[i.path] != dataclasses.asdict(i)}
  if changed:
    if (out / _UNFINISHED / _COMPLETE).exists():
      raise UsageError(f"{min(changed)} has changed since {out} was started; delete {out}")
    for g, group in enumerate(recorded.groups):
      if in_group := changed.intersection(recorded.paths(group)):
        print(f"{min(in_group)} has changed: reading it again")
        delete_group(out / _UNFINISHED, g)
    write_json(out / PLAN, {**record, "inputs": plan.to_json()["inputs"]})
  return recorded


@contextlib.contextmanager
def _workers(count: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
  """A pool of processes that are terminated at once if anything goes wrong."""
  others = {*multiprocessing.active_children()}
  spawn = multiprocessing.get_context("spawn")
  pool = concurrent.futures.ProcessPoolExecutor(
    count, spawn, initializer=worker.start_worker, initargs=(spawn.Lock(),)
  )
  try:
    yield pool
  except BaseException as e:
    for process in {*multiprocessing.active_children()} - others:
      process.terminate()
    if isinstance(e, BrokenProcessPool):
      raise UserError(
        "a worker process was killed, perhaps for lack of memory; run the same command to resume, "
        "with fewer --workers if it happens again"
      ) from e
    if isinstance(e, KeyboardInterrupt):
      raise Interrupted("stopped; run the same command to resume") from e
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def _vocabulary(out: Path, plan: Plan, rules: Rules, a: argparse.Namespace) -> Path:
  """The path of the tokenizer in `out`, trained or copied there the first time."""
  path = out / TOKENIZER
  if path.exists():
    return path
  if a.tokenizer:
    tokenizer = Tokenizer.load(a.tokenizer)
  else:
    what = f"a {a.model_type} vocabulary of {a.vocab_size} pieces"
    print(f"training {what} ...", file=sys.stderr, flush=True)
    settings = {k: getattr(a, k) for k in vocabulary.SETTINGS}
    paths = [i.path for i in plan.inputs if i.split != "validation"]
    with _workers(1) as pool:  # the memory is freed when this process ends
      tokenizer = pool.submit(vocabulary.train, paths, rules, **settings).result()
  write_atomically(path, tokenizer.model_bytes)
  return path


def _process_chunks(
  unfinished: Path, plan: Plan, rules: Rules, tokenizer: Path, workers: int
) -> None:
  """Processes every chunk that is not complete yet."""
  if (unfinished / _COMPLETE).exists():
    return
  progress, started = Progress(0), time.monotonic()
  total = sum(i.bytes for i in plan.inputs)
  skipped = done = documents = 0  # bytes of the input files, and documents in them
  pending: dict[concurrent.futures.Future, int] = {}

  def collect(at_most: int) -> None:
    nonlocal done, documents
    while len(pending) > at_most:
      finished, _ = concurrent.futures.wait(
        pending, timeout=_POLL_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
      )
      for future in [task for task in pending if task in finished]:  # the first error is named
        done += pending.pop(future)
        shards = future.result()["splits"].values()
        documents += sum(s["tokens"]["documents"] for s in shards)
      if done:
        percent = 100 * (skipped + done) / total
        rate = documents / (time.monotonic() - started)
        line = f"{percent:.0f}%  {documents:,} documents  {rate:,.0f} documents/s"
        progress.work(line, done, total - skipped)

  with contextlib.closing(progress), _workers(workers) as pool:
    for chunk, stored_bytes in make_chunks(unfinished, plan, rules.text_field):
      if chunk is None:
        skipped += stored_bytes
        continue
      task = pool.submit(worker.process, chunk, rules, os.fspath(tokenizer))
      pending[task] = stored_bytes
      collect(workers + 1)
    collect(0)
  write_json(unfinished / _COMPLETE, {})


if __name__ == "__main__":
  errors.run(main)
