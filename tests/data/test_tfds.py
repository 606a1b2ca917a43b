"""Tokenising on the fly: nothing lost or doubled, exact resume, one host's share each."""

import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.streams import B, L, assert_same, stream, take
from helpers.tfrecords import frame

from nanosam.data import prepare, tfds
from nanosam.data.preparation import tfrecord
from nanosam.data.sources import merge_states, open_source
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.errors import UsageError, UserError

TEXTS = [f"Document {i} says: {'word ' * (i % 23)}and café {i * i}.\n" for i in range(420)]
TRAIN, VALIDATION = TEXTS[:390], TEXTS[390:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  for name, texts in (("train", TRAIN), ("validation", VALIDATION)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
  (folder / "t.model").write_bytes(train_tokenizer(TEXTS, 320).model_bytes)
  args = [f"--input={folder}/train.jsonl", f"--validation={folder}/validation.jsonl"]
  args += [f"--tokenizer={folder}/t.model", f"--output={folder}/out", "--shard_bytes=3000"]
  prepare.prepare(prepare.parse([*args, "--workers=1"]))
  return folder / "out"


def open_it(name, **more):
  return open_source(name, vocab_size=0, cache_dir="", **more)


@pytest.fixture(scope="module")
def source(directory):
  return open_it(f"tfds:{directory}")


def tokens_of(batches):
  """The stream of tokens, once each: rows share one with the next."""
  flat = np.concatenate([b.inputs.ravel() for b in batches])
  return np.append(flat, batches[-1].targets_BxL[-1, -1])


def documents_in(tokens, tokenizer):
  """Texts of the whole documents, in order."""
  ends = np.flatnonzero(tokens == tokenizer.eos_id)
  starts = np.concatenate([[0], ends[:-1] + 1])
  assert (tokens[starts] == tokenizer.bos_id).all()
  return [tokenizer.decode(tokens[a + 1 : b]) for a, b in zip(starts, ends, strict=True)]


def test_a_stream_is_whole_documents_each_once_per_epoch(source):
  batches = take(source, 220)
  for b in batches:
    np.testing.assert_array_equal(b.inputs.ravel()[1:], b.targets_BxL.ravel()[:-1])
    assert b.inputs.dtype == b.targets_BxL.dtype == np.int32
    assert b.weights_BxL.all()
  for a, b in itertools.pairwise(batches):
    assert a.targets_BxL[-1, -1] == b.inputs[0, 0], "the next batch goes on at once"
  found = documents_in(tokens_of(batches), source.tokenizer)
  n = len(TRAIN)
  assert len(found) > 2 * n
  assert Counter(found[:n]) == Counter(found[n : 2 * n]) == Counter(TRAIN)
  assert found[:n] != found[n : 2 * n] != TRAIN


def test_seeds_have_orders_of_their_own(source):
  assert not np.array_equal(take(source, 1)[0][0], take(source, 1, data_seed=1)[0][0])


def test_workers_and_prefetch_do_not_matter(source):
  plain = take(source, 30, prefetch=0)
  assert_same(take(source, 30, prefetch=9), plain)
  assert_same(take(source, 30, workers=2), plain)


@pytest.mark.parametrize("steps", [1, 23, 110])
def test_restored_stream_continues_exactly(source, steps):
  """The tail of a document that a batch has begun is part of the state."""
  whole = take(source, steps + 20, mask_documents=True)
  first = stream(source, mask_documents=True)
  for _ in range(steps):
    next(first)
  state = json.loads(json.dumps(first.state()))
  assert len(json.dumps(state)) < 200
  first.close()
  assert_same([next(first)], whole[steps : steps + 1])  # It goes on after a close as well.
  second = stream(source, mask_documents=True, prefetch=7)
  next(second)
  second.restore(state)
  assert second.state() == state
  assert_same(list(itertools.islice(second, 20)), whole[steps:])
  for s in (first, second):
    s.close()


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_the_documents(source, hosts):
  n = B // hosts
  found = Counter()
  for h in range(hosts):
    batches = []
    with pytest.raises(UserError, match="training data ends after"):
      for batch in stream(source, rows=range(h * n, h * n + n), repeat=False):
        batches.append(batch)
    assert batches[0].inputs.shape == (n, L)
    mine = documents_in(tokens_of(batches), source.tokenizer)
    found.update(mine)
    assert len(mine) > 0.8 * len(TRAIN) / hosts
  assert max(found.values()) == 1, "a document on two hosts"


def test_hosts_resume_from_one_merged_state(source):
  streams = [stream(source, rows=range(h * 4, h * 4 + 4)) for h in range(2)]
  for _ in range(7):
    for s in streams:
      next(s)
  merged = json.loads(json.dumps(merge_states([s.state() for s in streams])))
  expected = [next(s) for s in streams]
  again = [stream(source, rows=range(h * 4, h * 4 + 4)) for h in range(2)]
  for s, e in zip(again, expected, strict=True):
    s.restore(merged)
    assert_same([next(s)], [e])
  with pytest.raises(UserError, match="has no data position for host 1"):
    again[1].restore(again[0].state())
  for s in (*streams, *again):
    s.close()


def test_another_host_count_is_refused(source):
  state = stream(source, rows=range(4)).state()
  with pytest.raises(UserError, match=r"made by 2 host\(s\), this run has 1: .*prepare"):
    stream(source).restore(state)


def test_other_data_is_refused(source):
  s = stream(source)
  with pytest.raises(UserError, match="made with data 0123"):
    s.restore({**s.state(), "fingerprint": "0123"})


def test_rows_that_are_no_equal_share(source):
  for rows in (range(0), range(3), range(2, 6), range(0, 8, 2)):
    with pytest.raises(ValueError, match="equal share"):
      stream(source, rows=rows)


def test_running_out(source):
  batches = []
  s = stream(source, repeat=False)
  with pytest.raises(UserError, match="ends after") as e:
    for batch in s:
      batches.append(batch)
  assert f"ends after {len(batches)} steps" in str(e.value)
  assert s.epoch() == pytest.approx(1, abs=0.1)
  total = sum(len(source.tokenizer.encode(t)) + 2 for t in TRAIN)
  assert len(batches) == (total - 1) // (B * L)
  assert source.train_tokens == pytest.approx(total, rel=0.1)
  source.check_length(L=L, batch_size=B, steps=len(batches), repeat=False)
  source.check_length(L=L, batch_size=B, steps=10**6, repeat=True)
  with pytest.raises(UserError, match=r"about .* tokens, but"):
    source.check_length(L=L, batch_size=B, steps=2 * len(batches), repeat=False)


def test_masked_documents(source):
  bos = source.tokenizer.bos_id
  for batch in take(source, 10, mask_documents=True):
    starts = np.cumsum(batch.inputs[:, 1:] == bos, axis=1) + 1
    np.testing.assert_array_equal(batch.segments_BxL[:, 1:], starts)
    np.testing.assert_array_equal(batch.weights_BxL, batch.targets_BxL != bos)


@pytest.mark.parametrize("rows", [6, 11, 1000])
def test_validation_is_that_of_the_token_store(directory, source, rows):
  store = open_it(f"tokens:{directory}")
  for masked in (False, True):
    a, b = (x.validation(L=L, rows=rows, mask_documents=masked) for x in (source, store))
    c, d = (
      x.validation(L=L, rows=rows, mask_documents=masked, eval_rows="documents")
      for x in (source, store)
    )
    assert_same([c.batch], [d.batch])
    assert c[1:] == d[1:]
    assert (a.bytes, a.documents) == (b.bytes, b.documents)
    assert_same([a.batch], [b.batch])


def test_validation_rows_that_hold_no_document(source):
  with pytest.raises(UserError, match=r"no validation document fits in .*; the first needs"):
    source.validation(L=2, rows=1, mask_documents=False)


def test_by_name_in_a_data_dir(directory, source):
  found = open_it("tfds:text:1.0.0", data_dir=str(directory))
  assert found.fingerprint == source.fingerprint
  assert open_it(f"tfds:{directory}/text/1.0.0").fingerprint == source.fingerprint


def test_fingerprint_tells_texts_and_vocabularies_apart(directory, source, tmp_path):
  other = train_tokenizer(TEXTS, 330)
  (tmp_path / "o.model").write_bytes(other.model_bytes)
  found = open_it(f"tfds:{directory}", tokenizer=str(tmp_path / "o.model"))
  assert found.tokenizer.vocab_size == 330
  assert found.fingerprint != source.fingerprint


def test_a_name_that_is_not_there(directory):
  with pytest.raises(UsageError, match=r"no TFDS data set c4/en:3\.1\.0 in .*data_dir.*prepare"):
    open_it("tfds:c4/en:3.1.0", data_dir=str(directory))


def test_a_data_set_without_tokenizer(directory, tmp_path):
  shutil.copytree(directory / "text/1.0.0", tmp_path / "a/b/c")
  with pytest.raises(UsageError, match=r"has no tokenizer\.model: name one with data\.tokenizer"):
    open_it(f"tfds:{tmp_path}/a/b/c")


def test_a_wrong_text_field_lists_the_right_ones(directory):
  with pytest.raises(UserError, match=r"no text in field 'body'.*one of text"):
    open_it(f"tfds:{directory}", text_field="body")


def test_a_missing_split_is_named(directory, tmp_path):
  shutil.copytree(directory, tmp_path / "x")
  path = tmp_path / "x/text/1.0.0/dataset_info.json"
  info = json.loads(path.read_text())
  path.write_text(json.dumps({**info, "splits": info["splits"][:1]}))
  with pytest.raises(UserError, match="no validation split, only train"):
    open_it(f"tfds:{tmp_path}/x")


def test_tfrecord_form_is_told_how_to_convert_and_that_works(directory, tmp_path):
  """As TFDS itself lays it out."""
  place = tmp_path / "c4/en/3.1.0"
  place.mkdir(parents=True)
  for split, texts in (("train", TRAIN), ("validation", VALIDATION)):
    data = b"".join(frame(tfrecord.text_example("text", t.encode())) for t in texts)
    (place / f"c4-{split}.tfrecord-00000-of-00001").write_bytes(data)
  made = directory / "text/1.0.0"
  shutil.copy(made / "features.json", place)
  info = json.loads((made / "dataset_info.json").read_text())
  info |= {"name": "c4", "configName": "en", "version": "3.1.0", "fileFormat": "tfrecord"}
  for split, texts in zip(info["splits"], (TRAIN, VALIDATION), strict=True):
    split["shardLengths"] = [str(len(texts))]
  (place / "dataset_info.json").write_text(json.dumps(info))
  model = directory / "tokenizer.model"
  with pytest.raises(UsageError, match="stored as tfrecord") as e:
    open_it("tfds:c4/en:3.1.0", data_dir=str(tmp_path), tokenizer=str(model))
  command = str(e.value).partition("convert it: ")[2].partition(", and set")[0]
  words = command.replace("DIR", str(tmp_path / "x")).split()
  subprocess.run(
    [sys.executable, *(w.replace("'", "") for w in words[1:]), f"--tokenizer={model}"],
    check=True,
    cwd=Path(tfds.__file__).parents[2],
    stdout=subprocess.DEVNULL,
  )
  found, expected = (StoreReader(d).split("train") for d in (tmp_path / "x", directory))
  assert found.num_tokens == expected.num_tokens
  np.testing.assert_array_equal(found.read(0, 10**6), expected.read(0, 10**6))


def test_tensorflow_is_never_imported(source):
  take(source, 1)
  assert "tensorflow" not in sys.modules
