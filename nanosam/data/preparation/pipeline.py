"""The work of `prepare`, from a plan to a finished store; resumes what an earlier call has left."""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from nanosam.data.preparation import inputs, splitting, vocabulary, worker
from nanosam.data.preparation.assembly import PLAN, assemble
from nanosam.data.preparation.chunking import delete_group, make_chunks
from nanosam.data.preparation.inputs import Arguments, Plan, changes, make_plan
from nanosam.data.preparation.worker import Rules
from nanosam.data.store import MANIFEST, TOKENIZER
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import Interrupted, UsageError, UserError
from nanosam.system.files import PARTIAL, disk_errors, lock_file, write_atomically, write_json
from nanosam.system.progress import Progress, duration

_UNFINISHED = "unfinished"
_COMPLETE = "complete.json"  # all chunks are there and are being moved into place
_LOG = "tokenizer.log"
_POLL_SECONDS = 0.5
_SPLIT = "split"  # in prepare.json: how the splits were told apart, if not by the fraction alone


def prepare(a: Arguments, wait: bool = False) -> dict[str, Any]:
  """Prepares everything, or what is left to do; returns the summary.

  If another process is preparing the same, waits for it or fails.
  """
  out = Path(a.output).expanduser()
  plan = make_plan(a)
  fresh = not (out / PLAN).exists()
  rules = _rules(plan, a) if fresh else None  # what cannot work is said before anything is there
  lock = _lock(out, wait)
  try:
    record = _start_or_resume(out, plan)
    if (out / MANIFEST).exists():
      shutil.rmtree(out / _UNFINISHED, ignore_errors=True)
    else:
      rules = _recorded_rules(out, record, rules or _rules(plan, a))
      record = _run(out, _recorded_plan(out, plan, record), rules, a)
  finally:
    os.close(lock)
  return record["summary"]


def _run(out: Path, plan: Plan, rules: Rules, a: Arguments) -> dict[str, Any]:
  with disk_errors(out):
    _process_chunks(out / _UNFINISHED, plan, rules, _vocabulary(out, plan, rules, a), a.workers)
    return assemble(out, out / _UNFINISHED, len(plan.groups))


def _rules(plan: Plan, a: Arguments) -> Rules:
  asked = Rules(a.text_field, inputs.validation_fraction(a), a.on_error, a.border)
  return splitting.decide(plan.inputs, asked, a.validation_fraction)


def _recorded_rules(out: Path, record: dict[str, Any], rules: Rules) -> Rules:
  """The split that was started with; files may have changed since."""
  ours = {"validation_fraction": rules.validation_fraction, "cut": rules.cut}
  asked = {"validation_fraction": record["arguments"]["validation_fraction"], "cut": 0}
  if _SPLIT not in record and ours != asked:
    record[_SPLIT] = ours
    write_json(out / PLAN, record)
  return dataclasses.replace(rules, **record.get(_SPLIT, {}))


def cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lock(out: Path, wait: bool) -> int:
  try:
    out.mkdir(parents=True, exist_ok=True)
    return lock_file(out, wait=wait)
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


def _vocabulary(out: Path, plan: Plan, rules: Rules, a: Arguments) -> Path:
  """The path of the tokenizer in `out`, trained or copied there the first time."""
  path = out / TOKENIZER
  if path.exists():
    return path
  tokenizer = Tokenizer.load(a.tokenizer) if a.tokenizer else _train(out, plan, rules, a)
  write_atomically(path, tokenizer.model_bytes)
  return path


def _train(out: Path, plan: Plan, rules: Rules, a: Arguments) -> Tokenizer:
  """In a process of its own: its memory is freed when that ends."""
  settings = {k: getattr(a, k) for k in (*vocabulary.SETTINGS, "may_be_smaller")}
  size, log = a.vocab_size, out / _UNFINISHED / _LOG
  what = f"training a {a.model_type} vocabulary of {size} pieces"
  progress, started = Progress(0), time.monotonic()
  progress.note(f"{what} ...")
  paths = [i.path for i in plan.inputs if i.split != "validation"]
  with contextlib.closing(progress), _workers(1) as pool:
    task = pool.submit(vocabulary.train, paths, rules, **settings, log=log)
    while not concurrent.futures.wait([task], timeout=_POLL_SECONDS).done:
      seconds = duration(time.monotonic() - started)
      progress.show(f"{what}: {seconds}{vocabulary.progress_in(log)}")
    tokenizer = task.result()
  if tokenizer.vocab_size != size:
    progress.note(f"the text is small: {tokenizer.vocab_size} pieces instead of {size}")
  return tokenizer


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
    for chunk, stored_bytes in make_chunks(unfinished, plan, rules):
      if chunk is None:
        skipped += stored_bytes
        continue
      task = pool.submit(worker.process, chunk, rules, os.fspath(tokenizer))
      pending[task] = stored_bytes
      collect(workers + 1)
    collect(0)
  write_json(unfinished / _COMPLETE, {})
