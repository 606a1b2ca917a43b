"""Tokenizer and token store: exact round trips, and damage that is named."""

import io
import json
import pickle

import numpy as np
import pytest
import sentencepiece

from nanosam.data.store import Split, StoreReader, StoreWriter
from nanosam.data.tokenizer import Tokenizer, token_dtype, train_tokenizer
from nanosam.system.errors import UsageError, UserError

TEXTS = [f"def f{i}(x):\n    return  x + {i}\n\nThe number {i} is a number.\n" for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
  return train_tokenizer(TEXTS, 320)


def write(directory, tokenizer, shards):
  """One train shard per list of texts, and one validation shard."""
  writer = StoreWriter(directory, tokenizer)
  train = [
    writer.write_shard("train", i, [(tokenizer.encode(t), len(t.encode())) for t in texts])
    for i, texts in enumerate(shards)
  ]
  validation = writer.write_shard("validation", 0, [(tokenizer.encode("a b"), 3)])
  writer.commit({"train": train, "validation": [validation]})
  return StoreReader(directory)


def framed(tokenizer, texts):
  return [i for t in texts for i in (tokenizer.bos_id, *tokenizer.encode(t), tokenizer.eos_id)]


@pytest.mark.parametrize(
  "text", ["", " ", "a\n\n    b  c\t\n", "Grüße, 漢字 😀", "<s>text</s> <0x0A>", "\r\n x"]
)
def test_text_survives_the_tokenizer(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text
  special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
  assert not special.intersection(tokenizer.encode(text))


def test_special_ids_and_determinism(tokenizer):
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
  assert tokenizer.vocab_size == 320
  assert train_tokenizer(TEXTS, 320).sha256 == tokenizer.sha256
  copy = pickle.loads(pickle.dumps(tokenizer))
  assert copy.encode_batch(TEXTS) == [tokenizer.encode(t) for t in TEXTS]


@pytest.mark.parametrize("vocab_size, reason", [(10, "need"), (100_000, "at most")])
def test_vocabulary_that_does_not_suit_the_text(vocab_size, reason):
  with pytest.raises(UsageError, match=reason):
    train_tokenizer(TEXTS, vocab_size)


def test_tokenizer_without_pad_and_bos_is_named(tmp_path):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS),
    model_writer=model,
    vocab_size=60,
    model_type="bpe",
    bos_id=-1,
    minloglevel=2,
  )
  path = tmp_path / "t5.model"
  path.write_bytes(model.getvalue())
  with pytest.raises(UsageError, match=r"t5\.model has no pad, bos token"):
    Tokenizer.load(path)


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_file_that_is_no_tokenizer(tmp_path, content):
  (tmp_path / "x.model").write_bytes(content)
  with pytest.raises(UserError, match=r"x\.model is not a SentencePiece model"):
    Tokenizer.load(tmp_path / "x.model")


def test_shards_read_as_one_stream(tmp_path, tokenizer):
  shards = [TEXTS[:3], [], TEXTS[3:4], TEXTS[4:10]]
  split = write(tmp_path / "s", tokenizer, shards).split("train")
  expected = framed(tokenizer, TEXTS[:10])
  assert split.read(0, split.num_tokens).tolist() == expected
  rng = np.random.default_rng(0)
  for start, stop in np.sort(rng.integers(0, len(expected) + 5, (200, 2))):
    assert split.read(start, stop).tolist() == expected[start:stop]
  table = split.documents()
  assert table[:, 0].tolist() == [len(framed(tokenizer, [t])) for t in TEXTS[:10]]
  assert table[:, 1].tolist() == [len(t.encode()) for t in TEXTS[:10]]
  copy: Split = pickle.loads(pickle.dumps(split))
  assert copy.read(5, 50).tolist() == expected[5:50]


def test_a_large_vocabulary_takes_four_bytes():
  assert token_dtype(1 << 16).itemsize == 2
  assert token_dtype((1 << 16) + 1).itemsize == 4


def test_a_large_vocabulary_is_stored_whole(tmp_path, tokenizer, monkeypatch):
  monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
  writer = StoreWriter(tmp_path, tokenizer)
  shard = writer.write_shard("train", 0, [([69_999, 3], 2)])
  split = Split(writer.directory, [shard], token_dtype(70_000))
  assert split.read(0, 9).tolist() == [tokenizer.bos_id, 69_999, 3, tokenizer.eos_id]


@pytest.mark.parametrize("ids", [[5, 320], [70_000], [-1], np.asarray([65_536 + 5], np.int32)])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, tokenizer, ids):
  with pytest.raises(UserError, match="outside the vocabulary of 320"):
    StoreWriter(tmp_path, tokenizer).write_shard("train", 0, [(ids, 1)])


@pytest.mark.parametrize("change", [{"dtype": "uint32"}, {"vocab_size": 70_000}])
def test_a_dtype_that_does_not_fit_the_vocabulary(tmp_path, tokenizer, change):
  write(tmp_path, tokenizer, [TEXTS[:1]])
  path = tmp_path / "store.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
  with pytest.raises(UserError, match=r"store\.json says .* does not match the tokenizer's 320"):
    StoreReader(tmp_path)


def test_fingerprint_names_the_tokens_not_the_place(tmp_path, tokenizer):
  a = write(tmp_path / "a", tokenizer, [TEXTS[:3]])
  b = write(tmp_path / "b", tokenizer, [TEXTS[:3]])
  c = write(tmp_path / "c", tokenizer, [TEXTS[1:4]])
  assert a.fingerprint == b.fingerprint != c.fingerprint


def test_without_commit_there_is_no_store(tmp_path, tokenizer):
  StoreWriter(tmp_path, tokenizer).write_shard("train", 0, [([5], 1)])
  with pytest.raises(UserError, match=r"no store\.json"):
    StoreReader(tmp_path)


def test_a_shard_cut_short_never_gets_its_name(tmp_path, tokenizer):
  def documents():
    yield [5, 6], 2
    raise RuntimeError("killed")

  with pytest.raises(RuntimeError):
    StoreWriter(tmp_path, tokenizer).write_shard("train", 0, documents())
  assert not (tmp_path / "train-00000.tokens").exists()


def test_a_finished_store_is_not_overwritten(tmp_path, tokenizer):
  write(tmp_path, tokenizer, [TEXTS[:1]])
  with pytest.raises(UserError, match="already holds"):
    StoreWriter(tmp_path, tokenizer)


@pytest.mark.parametrize("name", ["train-00000.tokens", "train-00000.documents"])
def test_truncated_and_missing_files_are_named(tmp_path, tokenizer, name):
  store = write(tmp_path, tokenizer, [TEXTS[:3]])
  data = (tmp_path / name).read_bytes()
  (tmp_path / name).write_bytes(data[:-2])
  with pytest.raises(UserError, match=f"{name} has {len(data) - 2} bytes instead of {len(data)}"):
    store.split("train")
  (tmp_path / name).unlink()
  with pytest.raises(UserError, match=f"{name} is missing"):
    store.split("train")


def test_a_flipped_bit_fails_the_checksum(tmp_path, tokenizer):
  store = write(tmp_path, tokenizer, [TEXTS[:3]])
  store.verify()
  path = tmp_path / "train-00000.tokens"
  data = bytearray(path.read_bytes())
  data[7] ^= 1
  path.write_bytes(data)
  with pytest.raises(UserError, match=r"train-00000\.tokens does not match its checksum"):
    store.verify()


@pytest.mark.parametrize(
  "damage",
  [
    lambda text: text[: len(text) // 2],
    lambda text: "[]",
    lambda text: text.replace('"format": 1', '"format": 99'),
    lambda text: text.replace('"splits"', '"parts"'),
    lambda text: text.replace('"tokens"', '"tokns"'),
    lambda text: json.dumps({**json.loads(text), "dtype": "no such type"}),
  ],
)
def test_damaged_manifest_is_named(tmp_path, tokenizer, damage):
  write(tmp_path, tokenizer, [TEXTS[:1]])
  path = tmp_path / "store.json"
  path.write_text(damage(path.read_text()))
  with pytest.raises(UserError, match=r"store\.json"):
    StoreReader(tmp_path)


def test_foreign_tokenizer_is_refused(tmp_path, tokenizer):
  write(tmp_path, tokenizer, [TEXTS[:1]])
  (tmp_path / "tokenizer.model").write_bytes(train_tokenizer(TEXTS, 310).model_bytes)
  with pytest.raises(UserError, match="not the tokenizer that made this store"):
    StoreReader(tmp_path)


def test_missing_split_is_named(tmp_path, tokenizer):
  with pytest.raises(UserError, match="no test split, only train, validation"):
    write(tmp_path, tokenizer, [TEXTS[:1]]).split("test")
