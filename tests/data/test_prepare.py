"""prepare: the same bytes however it is run or interrupted; every document on the right side."""

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
import tensorflow_datasets as tfds
from helpers.corpus import (
  TRAIN,
  VALIDATION,
  arguments,
  contents,
  documents_of,
  run,
  start,
  texts,
  write_lines,
)
from helpers.tfrecords import frame

from nanosam.data import prepare
from nanosam.data.inspect import verify
from nanosam.data.preparation import assembly, tfrecord, worker
from nanosam.data.sources import open_source
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.errors import UsageError, UserError


def test_store_holds_every_document_once_in_order(prepared):
  out, said, _ = prepared
  store = StoreReader(out)
  assert documents_of(store, "train") == TRAIN
  assert documents_of(store, "validation") == VALIDATION
  verify(f"tokens:{out}")
  assert len(store.splits["train"]) > 5
  assert not list(out.rglob("*unfinished*")) and not list(out.rglob("*partial*"))
  assert any("400 documents" in line for line in said)
  assert any(f"{sum(len(t.encode()) for t in TRAIN):,} bytes" in line for line in said)
  assert any("skipped    0 documents" in line for line in said)


def test_texts_open_as_a_tfds_data_set(prepared):
  out, _, _ = prepared
  builder = tfds.builder_from_directory(out / "text/1.0.0")
  for split, expected in (("train", TRAIN), ("validation", VALIDATION)):
    source = builder.as_data_source(split)
    assert [source[i]["text"].decode() for i in range(len(source))] == expected
    assert builder.info.splits[split].num_bytes == sum(len(t.encode()) for t in expected)
  assert "tensorflow" not in sys.modules


def test_it_starts_quickly(prepared):
  """Neither of the slow imports, so that workers start at once."""
  assert not {"tensorflow", "jax", "grain", "tensorflow_datasets"}.intersection(prepared[2])


def test_it_trains_a_model_source(prepared):
  source = open_source(f"tokens:{prepared[0]}", vocab_size=0, cache_dir="")
  assert source.train_documents == 400
  assert source.validation(L=64, rows=500, mask_documents=False).documents == 30


def test_workers_do_not_matter(inputs, prepared, tmp_path):
  run(*arguments(inputs, tmp_path / "x", "--workers=3"))
  assert contents(tmp_path / "x") == contents(prepared[0])


def test_done_is_done(inputs, prepared, capsys):
  before = contents(prepared[0])
  times = {p: p.stat().st_mtime_ns for p in prepared[0].rglob("*")}
  summary = run(*arguments(inputs, prepared[0]))
  assert summary["train"]["documents"] == 400
  assert "already prepared" in capsys.readouterr().out
  assert contents(prepared[0]) == before
  assert {p: p.stat().st_mtime_ns for p in prepared[0].rglob("*")} == times


@pytest.mark.parametrize(
  "change, named",
  [
    (["--text_field=body"], "text_field: text -> body"),
    (["--shard_bytes=30000"], "shard_bytes: 20000 -> 30000"),
    (["--input={}/t.txt"], r"now with .*t\.txt"),
  ],
)
def test_other_arguments_are_refused(inputs, prepared, change, named):
  (inputs / "t.txt").write_text("x")
  with pytest.raises(UsageError, match=f"started with other arguments.*{named}"):
    run(*arguments(inputs, prepared[0], *(c.format(inputs) for c in change)))


def test_kill_and_run_again(tmp_path):
  """kill -9 at two moments; finished shards stay, and the result is as if nothing had been."""
  folder = tmp_path / "in"
  folder.mkdir()
  for i in range(3):
    write_lines(folder / f"{i}.jsonl.gz", texts(800, seed=i))
  (folder / "t.model").write_bytes(train_tokenizer(TRAIN[:50], 400).model_bytes)
  args = [f"--input={folder}/*.gz", f"--tokenizer={folder}/t.model", "--shard_bytes=30000"]
  out = tmp_path / "out"
  kept: dict[str, int] = {}
  for wanted in (1, 8):
    process = start(*args, f"--output={out}", "--workers=2")
    while len(made := list(out.glob("unfinished/*/chunk.json"))) < wanted:
      assert process.poll() is None, process.communicate()
      time.sleep(0.002)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "workers must not outlive the command"
    assert not (out / "store.json").exists()
    with pytest.raises(UserError, match=r"no store\.json"):
      open_source(f"tokens:{out}", vocab_size=0, cache_dir="")
    for record in made:
      tokens = record.parent / "train-00000.tokens"
      kept.setdefault(str(record.parent), tokens.stat().st_mtime_ns)
      assert kept[str(record.parent)] == tokens.stat().st_mtime_ns, "made twice"
  run(*args, f"--output={out}")
  run(*args, f"--output={tmp_path / 'whole'}")
  assert contents(out) == contents(tmp_path / "whole")
  first = min(kept)
  assert (out / "train-00000.tokens").stat().st_mtime_ns == kept[first]
  summaries = [json.loads((d / "prepare.json").read_bytes()) for d in (out, tmp_path / "whole")]
  assert summaries[0]["summary"] == summaries[1]["summary"]


@pytest.mark.parametrize("moves", [0, 1, 7])
def test_cut_short_at_the_very_end(inputs, prepared, tmp_path, monkeypatch, moves):
  count = 0
  move = assembly._move

  def failing(source, target):
    nonlocal count
    if count == moves:
      raise KeyboardInterrupt
    count += 1
    move(source, target)

  args = arguments(inputs, tmp_path / "x")
  with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
    m.setattr(assembly, "_move", failing)
    run(*args)
  run(*args)
  assert contents(tmp_path / "x") == contents(prepared[0])


def test_a_file_that_was_mended_is_read_again(inputs, prepared, tmp_path):
  folder = tmp_path / "in"
  shutil.copytree(inputs, folder)
  broken = folder / "train-1.json.gz"
  whole = broken.read_bytes()
  broken.write_bytes(whole[:-100])
  args = arguments(folder, tmp_path / "x")
  with pytest.raises(UserError, match=rf"{broken}:\d+: cannot be read further.*--on_error=skip"):
    run(*args)
  broken.write_bytes(whole)
  run(*args)
  assert contents(tmp_path / "x") == contents(prepared[0])


def test_killed_while_writing_the_plan(inputs, prepared, tmp_path):
  (tmp_path / "x/unfinished").mkdir(parents=True)
  (tmp_path / "x/prepare.json.partial").write_text("{")
  run(*arguments(inputs, tmp_path / "x"))
  assert contents(tmp_path / "x") == contents(prepared[0])


def test_a_damaged_plan(inputs, prepared, tmp_path):
  shutil.copytree(prepared[0], tmp_path / "x")
  (tmp_path / "x" / "prepare.json").write_text("{")
  with pytest.raises(UserError, match=r"prepare\.json is damaged .* start over"):
    prepare.prepare(prepare.parse(arguments(inputs, tmp_path / "x")))


def test_two_at_once_are_refused(inputs, tmp_path):
  handle = os.open(tmp_path, os.O_RDONLY)
  fcntl.flock(handle, fcntl.LOCK_EX)
  with pytest.raises(UserError, match="another process is preparing"):
    run(*arguments(inputs, tmp_path))
  os.close(handle)


def test_a_directory_of_something_else_is_left_alone(inputs, tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(UsageError, match="not empty and was not made by this command"):
    run(*arguments(inputs, tmp_path))


def test_every_format_gives_the_same_store(inputs, prepared, tmp_path):
  """And the field may have another name."""
  folder = tmp_path / "in"
  folder.mkdir()
  pq.write_table(pa.table({"body": TRAIN[:150]}), folder / "a.parquet")
  records = (frame(tfrecord.text_example("body", t.encode())) for t in TRAIN[150:300])
  (folder / "b.tfrecord-00000-of-00001").write_bytes(b"".join(records))
  (folder / "c.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in TRAIN[300:399]))
  (folder / "d.txt").write_text(TRAIN[399])
  run(
    f"--input={folder}/*",
    f"--validation={inputs}/validation*",
    f"--tokenizer={inputs}/t.model",
    f"--output={tmp_path / 'x'}",
    "--text_field=body",
    "--on_error=skip",  # the validation file calls it text
    "--validation",
    str(folder / "d.txt"),
  )
  store = StoreReader(tmp_path / "x")
  assert documents_of(store, "train") == TRAIN[:399]
  assert documents_of(store, "validation") == TRAIN[399:]


def test_validation_by_fraction_is_by_what_a_document_says(inputs, tmp_path):
  folder = tmp_path / "in"
  folder.mkdir()
  write_lines(folder / "a.json", TRAIN)
  write_lines(folder / "b.json", [*TRAIN[:100], *texts(300, seed=5)])  # copies
  args = [f"--input={folder}/*.json", f"--tokenizer={inputs}/t.model", "--workers=1"]
  run(*args, f"--output={tmp_path / 'x'}", "--validation_fraction=0.2")
  store = StoreReader(tmp_path / "x")
  train, validation = (documents_of(store, s) for s in ("train", "validation"))
  assert len(train) + len(validation) == 800
  assert not set(train) & set(validation)
  assert 100 < len(validation) < 220
  run(*args, f"--output={tmp_path / 'y'}", "--validation_fraction=0.00001")
  store = StoreReader(tmp_path / "y")
  (held,) = set(documents_of(store, "validation"))
  assert held == min(train + validation, key=lambda t: hashlib.sha256(t.encode()).digest())
  assert held not in documents_of(store, "train")


def test_one_big_file_keeps_all_workers_busy(tmp_path, inputs):
  write_lines(tmp_path / "a.json.gz", texts(1500))
  args = [f"--input={tmp_path}/a.json.gz", f"--tokenizer={inputs}/t.model", "--shard_bytes=50000"]
  process = start(*args, f"--output={tmp_path / 'x'}", "--workers=2")
  at_once = 0
  while process.poll() is None:
    try:
      begun = list(tmp_path.glob("x/unfinished/*/train-00000.tokens.partial"))
    except FileNotFoundError:  # a folder went away while it was being listed
      continue
    # A listing takes time; those of it that are still there afterwards were there together.
    at_once = max(at_once, sum(path.exists() for path in begun))
  assert process.returncode == 0, process.communicate()
  process.communicate()
  assert at_once == 2


# Bad input.


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--input=/nowhere/*.json"], "no file matches /nowhere/"),
    (["--input={}/t.model"], r"t\.model: unknown kind of file"),
    (["--tokenizer=/nowhere.model"], "cannot read the tokenizer /nowhere.model"),
    (["--tokenizer={}/train-2.json"], r"train-2\.json is not a SentencePiece model"),
    (["--validation_fraction=1.5"], r"1\.5: not in \(0, 1\)"),
    (["--validation_fraction=0.5", "--validation={}/v*"], "exclude each other"),
    (["--tokenizer={}/t.model", "--vocab_size=5"], "not allowed with"),
    (["--workers=0"], "at least 1"),
    (["--on_error=ignore"], "invalid choice"),
    (["--vocab=5"], "unrecognized arguments: --vocab=5"),
    (["--output=gs://bucket/x"], "must be local"),
    (["--validation={}/train*"], "every input file is for validation"),
  ],
)
def test_bad_requests_are_one_line(inputs, tmp_path, flags, message):
  given = [f"--input={inputs}/train*", f"--output={tmp_path / 'x'}"]
  with pytest.raises(UserError, match=message) as e:
    run(*given, *(f.format(inputs) for f in flags))
  assert "\n" not in str(e.value)
  assert not (tmp_path / "x").exists()


def test_a_tokenizer_without_bos(inputs, tmp_path):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TRAIN), model_writer=model, vocab_size=75, bos_id=-1, minloglevel=2
  )
  (tmp_path / "m.model").write_bytes(model.getvalue())
  with pytest.raises(UsageError, match=r"m\.model has no pad, bos token"):
    run(f"--input={inputs}/train*", f"--output={tmp_path / 'x'}", f"--tokenizer={tmp_path}/m.model")


BAD = {
  3: b'{"text": "cut',
  5: b'{"body": "x"}',
  6: b'{"text": ""}',
  9: b'{"text": "\xff"}',
}


@pytest.fixture
def bad_files(inputs, tmp_path):
  folder = tmp_path / "in"
  folder.mkdir()
  lines = [json.dumps({"text": t}).encode() for t in TRAIN[:20]]
  for number, line in BAD.items():
    lines[number - 1] = line
  (folder / "a.json").write_bytes(b"\n".join(lines))
  (folder / "b.json.gz").write_bytes(gzip.compress(b"\n".join(lines))[:-200])
  write_lines(folder / "v.json", VALIDATION)
  return [
    f"--input={folder}/*",
    f"--validation={folder}/v.json",
    f"--tokenizer={inputs}/t.model",
    "--workers=1",
    "--shard_bytes=2000",
    f"--output={tmp_path / 'x'}",
  ]


def test_bad_documents_are_skipped_and_counted(bad_files, tmp_path, capsys):
  summary = run(*bad_files, "--on_error=skip")
  good = [t for i, t in enumerate(TRAIN[:20], 1) if i not in BAD]
  found = documents_of(StoreReader(tmp_path / "x"), "train")
  assert found[:16] == good
  rest = found[16:]
  assert rest == good[: len(rest)], "what could be read of the broken file"
  assert rest
  assert summary["skipped"] == 4 + sum(n < TRAIN.index(rest[-1]) + 1 for n in BAD) + 1
  said = capsys.readouterr().out
  for number, reason in zip(BAD, ("invalid JSON", "no text", "empty", "invalid UTF"), strict=True):
    assert f"a.json:{number}: {reason}" in said


def test_bad_documents_stop_it_by_default(bad_files, tmp_path):
  with pytest.raises(UserError, match=r"a\.json:3: invalid JSON.*or skip such documents"):
    run(*bad_files)
  summary = run(*bad_files, "--on_error=skip")  # goes on from there
  assert summary["skipped"] > 4
  with pytest.raises(UsageError, match="on_error: skip -> fail"):
    run(*bad_files)


def test_a_command_that_fails_says_one_line_and_leaves_no_process(bad_files):
  process = start(
    *bad_files,
    code="from nanosam.data.prepare import main; from nanosam.system import errors; "
    "errors.run(main)",
  )
  _, err = process.communicate()
  assert process.returncode == 1
  assert err.startswith("nanosam: ") and err.count("\n") == 1


@pytest.mark.parametrize("largest", [5_000, 20_500])
def test_a_full_disk(inputs, prepared, tmp_path, largest):
  """Played by a limit on the size of files: on the raw input of a chunk, and on a shard."""
  args = arguments(inputs, tmp_path / "x", f"--tokenizer={inputs}/t.model")
  code = f"""
import resource
from nanosam.system import errors
from nanosam.data.prepare import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))
errors.run(main)
"""
  process = start(*args, code=code)
  _, err = process.communicate()
  assert process.returncode == 1
  assert err.startswith("nanosam: cannot write ") and err.count("\n") == 1, err
  run(*args)
  assert contents(tmp_path / "x") == contents(prepared[0])


def die(*_):
  os._exit(1)


def test_a_killed_worker_is_reported(inputs, tmp_path, monkeypatch):
  monkeypatch.setattr(worker, "process", die)
  with pytest.raises(UserError, match="a worker process was killed"):
    run(*arguments(inputs, tmp_path / "x"))


def test_nothing_left_to_train_on(inputs, tmp_path):
  (tmp_path / "a.json").write_text('{"text": ""}\n')
  with pytest.raises(UserError, match=r"there are no documents to train on \(.*a\.json:1: empty"):
    run(
      f"--input={tmp_path}/a.json",
      f"--validation={inputs}/validation*",
      f"--tokenizer={inputs}/t.model",
      f"--output={tmp_path / 'x'}",
      "--on_error=skip",
    )


@pytest.mark.full
def test_documents_of_50_mb_in_bounded_memory(inputs, tmp_path):
  """Also with a character that makes Python take four bytes for each of the others."""
  with open(tmp_path / "a.json", "w") as f:
    for i in range(4):
      text = " ".join(TRAIN[:100]) * 2
      text = f"{i} " + text * (50_000_000 // len(text.encode()))
      f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
  process = start(
    f"--input={tmp_path}/a.json",
    f"--validation={inputs}/validation*",
    f"--tokenizer={inputs}/t.model",
    f"--output={tmp_path / 'x'}",
    "--workers=2",
  )
  peak = 0
  while process.poll() is None:
    with contextlib.suppress(psutil.Error):  # one of them has just ended
      root = psutil.Process(process.pid)
      tree = (root, *root.children(recursive=True))
      peak = max(peak, sum(p.memory_info().rss for p in tree))
    time.sleep(0.02)
  assert process.returncode == 0, process.communicate()
  process.communicate()
  assert peak < 1.5 * 2**30
  split = StoreReader(tmp_path / "x").split("train")
  assert split.num_documents == 4
  assert split.num_bytes > 190_000_000
