"""The embedded corpus: deterministic, split by document, and nothing of it ever imported."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanosam.data import embedded
from nanosam.data.sources import open_source
from nanosam.data.store import StoreReader
from nanosam.system.errors import UserError

PROSE = "This sentence is long enough to be kept as a piece of documentation. " * 4
SMALL = ("etils", "optax", "treescope")  # enough text for a small tokenizer, quick to read


def make_distribution(root: Path, files: dict[str, str]) -> None:
  """An installed distribution `fake`, as far as importlib.metadata can tell."""
  for name, text in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  info = root / "fake-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
  (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))


def only(monkeypatch, *distributions):
  monkeypatch.setattr(embedded, "DISTRIBUTIONS", distributions)
  monkeypatch.setattr(embedded, "_standard_library_files", lambda: [])


def build_in_process(cache, vocab_size, distributions=None) -> subprocess.Popen:
  """Builds in a process of its own, which begins when its stdin closes."""
  code = f"""
import json, sys
from nanosam.data import embedded
from nanosam.data.sources import open_source
if {distributions!r}:
  embedded.DISTRIBUTIONS = {distributions!r}
  embedded._standard_library_files = lambda: []
sys.stdin.read()
source = open_source("embedded", vocab_size={vocab_size}, cache_dir={str(cache)!r})
json.dump([source.fingerprint, sorted(sys.modules)], sys.stdout)
"""
  return subprocess.Popen(
    [sys.executable, "-c", code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=Path(embedded.__file__).parents[2],
  )


def begin_together(processes: list[subprocess.Popen]) -> None:
  for process in processes:
    process.stdin.close()
    process.stdin = None  # communicate() must not touch it again


def finish(process: subprocess.Popen) -> tuple[str, list[str], str]:
  out, err = process.communicate()
  assert process.returncode == 0, err
  fingerprint, modules = json.loads(out)
  return fingerprint, modules, err


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The real thing, built once: cache directory, fingerprint, imported modules, stderr."""
  cache = tmp_path_factory.mktemp("cache")
  return cache, *finish(build_in_process(cache, 4096))


def test_source_is_read_but_never_run(tmp_path, monkeypatch):
  marker = tmp_path / "it-ran"
  effect = f"open({str(marker)!r}, 'w').close()\n"
  make_distribution(tmp_path / "site", {"fake/__init__.py": f'"""Fake. {PROSE}"""\n{effect}'})
  monkeypatch.syspath_prepend(tmp_path / "site")
  only(monkeypatch, "fake")
  assert embedded.collect_documents() == [f"Fake. {PROSE.strip()}\n"]
  assert not marker.exists()
  assert "fake" not in sys.modules


def test_what_becomes_a_document(tmp_path, monkeypatch):
  module = f'''"""About the module. {PROSE}"""
class C(Base):
  """About the class, which does one thing and does it well."""
  def method(self, x, *, key=1):
    """About the method:

        indented example, and caf\\u00e9

    the end.
    """
    def inner():
      """About a function nobody can call from anywhere else."""
  def short(self):
    """Too short."""
'''
  make_distribution(
    tmp_path,
    {
      "fake/a.py": module,
      "fake/b_duplicate.py": module,
      "fake/tests/c.py": f'"""In a test directory. {PROSE}"""',
      "fake/d_test.py": f'"""In a test file. {PROSE}"""',
      "fake/_vendor/e.py": f'"""Copied from elsewhere. {PROSE}"""',
      "fake/f_broken.py": f'"""Not Python. {PROSE}"""\nprint "2"',
      "fake/g_tiny.py": '"""A tiny document is dropped, for it says little."""',
      "fake/h_surrogate.py": f'"""No text: \\ud800. {PROSE}"""',
      "fake/data.txt": PROSE,
    },
  )
  monkeypatch.syspath_prepend(tmp_path)
  only(monkeypatch, "fake")
  assert embedded.collect_documents() == [
    f"About the module. {PROSE.strip()}\n\n"
    "class C\nAbout the class, which does one thing and does it well.\n\n"
    "C.method(x, key)\nAbout the method:\n\n    indented example, and café\n\nthe end.\n"
  ]


def test_documents_do_not_depend_on_place_or_order_of_installation(tmp_path, monkeypatch):
  files = {f"fake/m{i}.py": f'"""Module {i}. {PROSE}"""' for i in range(12)}
  found = []
  for place, items in (("x", list(files.items())), ("deeper/y", list(files.items())[::-1])):
    with monkeypatch.context() as m:
      make_distribution(tmp_path / place, dict(items))
      m.syspath_prepend(tmp_path / place)
      only(m, "fake")
      found.append(embedded.collect_documents())
  assert found[0] == found[1]
  assert len(found[0]) == 12


def test_topics_of_the_language_reference_are_documents(monkeypatch):
  only(monkeypatch)
  topics = Path(os.__file__).parent / "pydoc_data" / "topics.py"
  monkeypatch.setattr(embedded, "_standard_library_files", lambda: [("topics", str(topics))])
  documents = embedded.collect_documents()
  assert len(documents) > 50
  assert any(d.startswith('The "assert" statement') for d in documents)


def test_two_processes_build_at_once(tmp_path):
  processes = [build_in_process(tmp_path, 1024, SMALL) for _ in range(2)]
  begin_together(processes)
  (a, _, _), (b, _, _) = (finish(p) for p in processes)
  assert a == b
  assert len(list(tmp_path.iterdir())) == 1, "only the finished store may stay"


def test_same_text_gives_the_same_store_elsewhere(tmp_path, monkeypatch):
  only(monkeypatch, *SMALL)
  stores = [StoreReader(embedded.build_embedded(tmp_path / d, 1024)) for d in "ab"]
  assert stores[0].fingerprint == stores[1].fingerprint
  other = StoreReader(embedded.build_embedded(tmp_path / "a", 1025))
  assert other.fingerprint != stores[0].fingerprint
  assert len(list((tmp_path / "a").iterdir())) == 2


def test_the_slower_builder_discards_its_copy(tmp_path, monkeypatch, capsys):
  write = embedded._write
  only(monkeypatch, *SMALL)

  def overtaken(directory, vocab_size):
    monkeypatch.setattr(embedded, "_write", write)
    embedded.build_embedded(tmp_path, vocab_size)
    write(directory, vocab_size)

  monkeypatch.setattr(embedded, "_write", overtaken)
  path = embedded.build_embedded(tmp_path, 1024)
  assert list(tmp_path.iterdir()) == [path]
  StoreReader(path).verify()
  assert capsys.readouterr().err.count("building the embedded corpus (once)") == 2


def test_failed_build_leaves_nothing(tmp_path, monkeypatch):
  only(monkeypatch, *SMALL)
  with pytest.raises(UserError, match="vocab_size=50"):
    embedded.build_embedded(tmp_path, 50)
  assert not list(tmp_path.iterdir())


def test_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  only(monkeypatch, *SMALL)
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"cannot write .*file.* NANOSAM_CACHE"):
    embedded.build_embedded(tmp_path / "file", 1024)


def test_nothing_that_is_read_is_imported(built):
  _, _, modules, _ = built
  # Grain itself imports jax and orbax.
  foreign = {"tensorflow", "tensorflow_datasets", "scipy", "wandb", "flax", "clu", "rich", "optax"}
  assert not foreign.intersection(modules)


def test_real_corpus(built, capsys):
  cache, fingerprint, _, err = built
  assert err.startswith("nanosam: building the embedded corpus (once)")
  source = open_source("embedded", vocab_size=4096, cache_dir=str(cache))
  assert capsys.readouterr().err == "", "the second start finds it built"
  assert source.fingerprint == fingerprint
  assert source.tokenizer.vocab_size == 4096
  store = StoreReader(next(cache.iterdir()))
  train, validation = store.split("train"), store.split("validation")
  assert 8e6 < train.num_bytes + validation.num_bytes < 25e6
  assert 0.03 < validation.num_bytes / train.num_bytes < 0.08
  assert train.num_bytes / train.num_tokens > 2.5, "bytes per token"


def test_real_documents_round_trip_and_do_not_cross_the_split(built):
  store = StoreReader(next(built[0].iterdir()))
  texts: dict[str, list[str]] = {"train": [], "validation": []}
  for name, found in texts.items():
    split, start, changed = store.split(name), 0, 0
    table = split.documents()
    for tokens, num_bytes in table:
      document = split.read(start, start + tokens)
      assert (document[0], document[-1]) == (store.tokenizer.bos_id, store.tokenizer.eos_id)
      text = store.tokenizer.decode(document[1:-1])
      if len(text.encode()) == num_bytes:
        assert name == "validation" or not embedded.is_validation(text)
      else:
        changed += 1  # It held U+2581, which is read back as a space.
      found.append(text)
      start += tokens
    assert start == split.num_tokens
    assert changed < 0.01 * len(table)
  assert len({*texts["train"], *texts["validation"]}) == sum(map(len, texts.values()))
  ours = [window for text in texts["validation"] for window in windows(store.tokenizer, text)]
  unseen = set(ours)
  for text in texts["train"]:
    unseen.difference_update(windows(store.tokenizer, text))
  assert len(ours) > 1e5
  seen = np.mean([window not in unseen for window in ours])
  assert seen < 0.002, "32 tokens in a row that training has seen word for word"


def windows(tokenizer, text):
  ids = tokenizer.encode_array(text)
  return (ids[i : i + 32].tobytes() for i in range(len(ids) - 31))


def test_boilerplate_is_dropped_from_validation_alone():
  notice = "Licensed to whom it may concern under\nthe terms of the licence, without any warranty."
  texts = [
    f"{notice}\n" + " ".join(hashlib.md5(f"{i} {j}".encode()).hexdigest() for j in range(20))
    for i in range(200)
  ]
  assert any(map(embedded.is_validation, texts))
  found = embedded.split_documents(texts)
  assert found["train"] == [text for text in texts if not embedded.is_validation(text)]
  kept = [text.removeprefix(f"{notice}\n") for text in texts if embedded.is_validation(text)]
  assert found["validation"] == kept


def test_damaged_cache_is_refused(built, tmp_path):
  shutil.copytree(built[0], tmp_path / "cache")  # others may read the first through a memory map
  (store,) = (tmp_path / "cache").iterdir()
  tokens = store / "train-00000.tokens"
  data = tokens.read_bytes()
  tokens.write_bytes(data[:1000] + b"\xff" + data[1001:])
  with pytest.raises(UserError, match=r"train-00000\.tokens .* delete the directory"):
    open_source("embedded", vocab_size=4096, cache_dir=str(tmp_path / "cache"))


@pytest.mark.full
def test_real_corpus_is_the_same_when_built_again_by_two_at_once(built, tmp_path):
  processes = [build_in_process(tmp_path, 4096) for _ in range(2)]
  begin_together(processes)
  for process in processes:
    assert finish(process)[0] == built[1]
  assert len(list(tmp_path.iterdir())) == 1
