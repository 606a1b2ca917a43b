"""A validation split always exists and never overlaps; what cannot work is said at once."""

import hashlib
import itertools

import pytest
from helpers.corpus import TRAIN, contents, documents_of, run, texts, write_lines

from nanosam.data.preparation import pipeline
from nanosam.data.store import StoreReader
from nanosam.system.errors import UserError

STORY = "\n".join(TRAIN[:40])


def digest(text):
  return hashlib.sha256(text.encode()).digest()


def splits(out):
  store = StoreReader(out)
  return documents_of(store, "train"), documents_of(store, "validation")


@pytest.fixture
def prepare(inputs, tmp_path):
  """Prepares with a tokenizer that is there, and returns both splits."""
  out = tmp_path / "out"

  def prepare(path, *more):
    run(f"--input={path}", f"--output={out}", f"--tokenizer={inputs}/t.model", *more)
    return splits(out)

  return prepare


@pytest.mark.parametrize("copies", [1, 2])
def test_a_lone_document_is_cut_at_the_end_of_a_line(prepare, tmp_path, capsys, copies):
  for i in range(copies):  # in copies, too, nothing of the one part is in the other
    (tmp_path / f"{i}.txt").write_text(STORY)
  train, validation = prepare(f"{tmp_path}/*.txt")
  assert len(train) == len(validation) == copies
  assert train[0] + validation[0] == STORY and {*train} == {train[0]}
  assert train[0].endswith("\n")
  assert 0.1 <= len(validation[0]) / len(STORY) < 0.15
  said = f"its last {len(validation[0]):,} characters of {len(STORY):,} are for validation"
  assert said in capsys.readouterr().err


def test_as_much_of_it_as_was_asked_for(prepare, tmp_path):
  (tmp_path / "a.txt").write_text("é" * 1000)  # no line ends anywhere
  train, validation = prepare(tmp_path / "a.txt", "--validation_fraction=0.25")
  assert (train, validation) == (["é" * 750], ["é" * 250])


def test_a_few_documents_are_divided(prepare, tmp_path, capsys):
  every = (texts(5, seed=seed) for seed in itertools.count())
  few = next(documents for documents in every if min(map(digest, documents))[0] > 0.25 * 256)
  write_lines(tmp_path / "a.jsonl", few)  # none of them is in the first quarter of all hashes
  train, validation = prepare(tmp_path / "a.jsonl", "--validation_fraction=0.25")
  assert validation == [t for t in few if t in sorted(few, key=digest)[:2]]
  assert train == [t for t in few if t not in validation]
  assert "of only 5 documents, 2 with" in capsys.readouterr().err


def test_one_for_training_is_left(prepare, tmp_path):
  write_lines(tmp_path / "a.jsonl", texts(3, seed=3))
  train, validation = prepare(tmp_path / "a.jsonl", "--validation_fraction=0.999999")
  assert len(train) == 1 and len(validation) == 2


def test_the_decision_outlives_a_kill(prepare, tmp_path, monkeypatch):
  """Files may change in between, and some chunks may be there already."""
  (tmp_path / "a.txt").write_text(STORY)

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
    m.setattr(pipeline, "_process_chunks", killed)
    prepare(tmp_path / "a.txt")
  with monkeypatch.context() as m:
    m.setattr("nanosam.data.preparation.splitting._LAST_PART", 0.5)
    train, validation = prepare(tmp_path / "a.txt")
  assert train[0] + validation[0] == STORY and len(validation[0]) < 0.15 * len(STORY)


@pytest.mark.parametrize(
  "text, said",
  [
    ("", r"a\.txt:1: empty document"),
    (" \n \n", r"a\.txt:1: empty document"),
    ("x", "has 1 characters, too few to hold some out for validation: add text, or name"),
    (b"\x80\x81", r"a\.txt:1: invalid UTF-8 at byte 0"),
  ],
)
def test_hopeless_text_leaves_nothing_behind(prepare, tmp_path, text, said):
  (tmp_path / "a.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError, match=said):
    prepare(tmp_path / "a.txt")
  assert not (tmp_path / "out").exists()


def test_no_validation_text_is_said_before_the_work(inputs, tmp_path):
  write_lines(tmp_path / "v.json", ["", " "])
  with pytest.raises(UserError, match=r"no documents to validate on \(.*v\.json:1: empty"):
    run(
      f"--input={inputs}/train*",
      f"--validation={tmp_path}/v.json",
      f"--output={tmp_path / 'out'}",
      "--on_error=skip",
    )
  assert not (tmp_path / "out").exists()


def test_a_folder_is_its_files_of_text(inputs, prepare, tmp_path, capsys):
  folder = tmp_path / "in"
  (folder / "deeper").mkdir(parents=True)
  (folder / ".git").mkdir()
  write_lines(folder / "deeper" / "b.jsonl.gz", TRAIN[:200])
  write_lines(folder / "a.jsonl", TRAIN[200:])
  (folder / ".git" / "c.txt").write_text("hidden")
  (folder / "notes.md").write_text("no")
  train, validation = prepare(folder)
  assert sorted(train + validation) == sorted(TRAIN)
  assert "left out: " in (err := capsys.readouterr().err) and "notes.md" in err
  write_lines(tmp_path / "all.jsonl", TRAIN[200:] + TRAIN[:200])
  out = tmp_path / "by_file"
  run(f"--input={tmp_path}/all.jsonl", f"--output={out}", f"--tokenizer={inputs}/t.model")
  assert contents(out) == contents(tmp_path / "out"), "the same documents in the same order"


def test_a_folder_without_text(prepare, tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "a.pdf").write_text("x")
  with pytest.raises(UserError, match=r"in has no files of text \(1 others, such as a\.pdf\)"):
    prepare(tmp_path / "in")
