"""Vocabularies that prepare trains or is given: decided by the corpus alone, and lossless."""

import functools
import io

import sentencepiece
from helpers.corpus import TRAIN, documents_of, run, write_lines

from nanosam.data.preparation import formats, vocabulary, worker
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import Tokenizer, train_tokenizer


def test_trained_vocabulary(inputs, tmp_path, capfd):
  out = tmp_path / "x"
  args = [f"--input={inputs}/train*", "--vocab_size=320", "--workers=1"]
  run(*args, f"--output={out}", "--validation_fraction=0.1", "--model_type=bpe")
  assert "training a bpe vocabulary of 320 pieces" in capfd.readouterr().err
  store = StoreReader(out)
  assert store.tokenizer.vocab_size == 320
  assert sorted(documents_of(store, "train") + documents_of(store, "validation")) == sorted(TRAIN)
  rules = worker.Rules("text", 0.1, "fail")
  files = sorted(str(p) for p in inputs.glob("train*"))
  sample = vocabulary.sample(files, rules, 10**9)
  assert sorted(sample) == sorted(documents_of(store, "train")), "nothing of validation"
  assert train_tokenizer(sample, 320, "bpe").sha256 == store.tokenizer.sha256


def test_sample_is_bounded_and_decided_by_the_corpus(inputs, monkeypatch):
  rules = worker.Rules("text", 0.0, "fail")
  files = sorted(str(p) for p in inputs.glob("train*"))
  pieces = functools.partial(formats.pieces, piece_bytes=1000)
  monkeypatch.setattr(formats, "pieces", pieces)
  sample = vocabulary.sample(files, rules, 20_000)
  assert 15_000 < sum(len(t.encode()) for t in sample) <= 20_000
  assert sample == vocabulary.sample(files, rules, 20_000)
  assert {TRAIN.index(t) // 150 for t in sample} == {0, 1, 2}, "from all files"
  monkeypatch.setattr(vocabulary, "_READ_PER_SAMPLED_BYTE", 2)
  monkeypatch.setattr(vocabulary, "_MIN_READ_PER_FILE", 1000)
  few = vocabulary.sample(files, rules, 20_000)
  assert max(TRAIN.index(t) % 150 for t in few) < 100, "only the beginnings are read"


def test_unigram_is_lossless_too():
  tokenizer = train_tokenizer(TRAIN[:100], 320, "unigram")
  for text in (*TRAIN[:5], " a\n\n  b\t😀ß"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def foreign_vocabulary(texts, **options):
  """A SentencePiece model with the usual settings, which are not ours."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts),
    model_writer=model,
    vocab_size=75,
    model_type="unigram",
    pad_id=0,
    eos_id=1,
    bos_id=2,
    unk_id=3,
    minloglevel=2,
    **options,
  )
  return model.getvalue()


def test_a_foreign_vocabulary_counts_the_bytes_of_the_text(tmp_path):
  """One that normalises: what comes back is shorter, and bits per byte must not care."""
  (tmp_path / "m.model").write_bytes(foreign_vocabulary(TRAIN[:50]))
  documents = ["a  b\n\n c", "ﬁve  " * 10]
  write_lines(tmp_path / "a.json", documents)
  write_lines(tmp_path / "v.json", documents[:1])
  run(
    f"--input={tmp_path}/a.json",
    f"--validation={tmp_path}/v.json",
    f"--tokenizer={tmp_path}/m.model",
    f"--output={tmp_path / 'x'}",
    "--workers=1",
  )
  table = StoreReader(tmp_path / "x").split("train").documents()
  assert table[:, 1].tolist() == [len(d.encode()) for d in documents]


def test_long_texts_are_encoded_in_parts(monkeypatch):
  """The same ids as at once, whether or not the model puts a space before a text."""
  text = " ".join(TRAIN[:20])
  plain = train_tokenizer(TRAIN, 400, "bpe")
  foreign = foreign_vocabulary(TRAIN, remove_extra_whitespaces=False)
  for tokenizer in (plain, Tokenizer(foreign)):
    whole = tokenizer.encode(text)
    with monkeypatch.context() as m:
      m.setattr("nanosam.data.tokenizer._PART_CHARS", 100)
      assert tokenizer.encode(text) == whole
      assert "".join(tokenizer.decode(tokenizer.encode("x" * 950)).split()) == "x" * 950
