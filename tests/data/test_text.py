"""data.source=text:PLACE prepares once, and again when the text has changed."""

import os

import pytest
from helpers.corpus import TRAIN, documents_of, run

from nanosam.data.preparation import pipeline
from nanosam.data.sources import open_source
from nanosam.data.store import StoreReader
from nanosam.system.errors import UserError


@pytest.fixture
def opened(tmp_path):
  def opened(place, **settings):
    settings = {"vocab_size": 320, **settings}
    return open_source(f"text:{place}", cache_dir=str(tmp_path / "cache"), **settings)

  return opened


def test_prepared_once_like_the_command_does(opened, tmp_path, capfd, monkeypatch):
  file = tmp_path / "input.txt"
  file.write_text("\n".join(TRAIN[:60]))
  source = opened(file)
  assert f"preparing {file} in" in capfd.readouterr().err
  run(f"--input={file}", f"--output={tmp_path / 'store'}", "--vocab_size=320")
  assert source.fingerprint == StoreReader(tmp_path / "store").fingerprint
  with monkeypatch.context() as m:
    m.setattr(pipeline, "prepare", None)  # whoever calls it fails
    assert opened(file).fingerprint == source.fingerprint
  os.utime(file, (1, 1))
  assert opened(file).fingerprint == source.fingerprint, "it is about what the text says"
  file.write_text("\n".join(TRAIN[60:120]))
  assert opened(file).fingerprint != source.fingerprint


def test_a_vocabulary_that_the_text_supports(opened, tmp_path, capfd):
  (tmp_path / "a.txt").write_text("\n".join(TRAIN[:60]))
  source = opened(tmp_path / "a.txt", vocab_size=4096)
  assert source.tokenizer.vocab_size < 4096
  said = f"the text is small: {source.tokenizer.vocab_size} pieces instead of 4096"
  assert said in capfd.readouterr().err


def test_borders(opened, tmp_path):
  (tmp_path / "a.txt").write_text("<|endoftext|>".join(t.replace("\n", " ") for t in TRAIN))
  opened(tmp_path / "a.txt", border="<|endoftext|>")
  (store,) = (tmp_path / "cache").glob("text-*")
  found = [d for split in ("train", "validation") for d in documents_of(StoreReader(store), split)]
  assert sorted(found) == sorted(t.replace("\n", " ") for t in TRAIN)


def test_a_missing_file(opened, tmp_path):
  with pytest.raises(UserError, match=r"no file matches .*nowhere\.txt"):
    opened(tmp_path / "nowhere.txt")


def test_what_cannot_be_prepared_leaves_nothing(opened, tmp_path):
  (tmp_path / "a.txt").write_text("")
  with pytest.raises(UserError, match="empty document"):
    opened(tmp_path / "a.txt")
  assert not list((tmp_path / "cache").glob("*"))
