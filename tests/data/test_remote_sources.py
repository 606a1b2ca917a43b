"""Remote data through a stand-in for Google's storage: fetched once, checked, resumed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

from nanosam.data import prepare
from nanosam.data.sources import open_source
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system import remote
from nanosam.system.errors import UsageError, UserError

TEXTS = [f"Document {i} says: {'word ' * (i % 23)}and café {i * i}.\n" for i in range(90)]
opened: list[str] = []


class Bucket(LocalFileSystem):
  """gs://bucket/x is the file x below a local directory."""

  protocol = ("gcs", "gs")
  root = ""

  @classmethod
  def _strip_protocol(cls, path):
    return str(path).removeprefix("gs://").rstrip("/")

  def _local(self, path):
    return f"{self.root}/{self._strip_protocol(path).partition('/')[2]}".rstrip("/")

  def open(self, path, mode="rb", **kwargs):
    opened.append(str(path))
    return open(self._local(path), mode)

  def info(self, path, **kwargs):
    found = super().info(self._local(path))
    return {**found, "name": self._strip_protocol(path)}

  def exists(self, path, **kwargs):
    return Path(self._local(path)).exists()

  def isdir(self, path):
    return Path(self._local(path)).is_dir()

  def ls(self, path, detail=False, **kwargs):
    base = self._strip_protocol(path)
    names = [f"{base}/{p.name}" for p in Path(self._local(path)).iterdir()]
    return [self.info(n) for n in names] if detail else names


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  (tmp_path / "bucket").mkdir()
  monkeypatch.setattr(Bucket, "root", str(tmp_path / "bucket"))
  monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Bucket())
  opened.clear()
  return tmp_path / "bucket"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("in")
  lines = [json.dumps({"text": t}) + "\n" for t in TEXTS]
  (folder / "train.jsonl").write_text("".join(lines[:70]))
  (folder / "validation.jsonl").write_text("".join(lines[70:]))
  (folder / "t.model").write_bytes(train_tokenizer(TEXTS, 320).model_bytes)
  return folder


def run_prepare(folder, out):
  args = [f"--input={folder}/t*.jsonl", f"--validation={folder}/v*.jsonl", "--shard_bytes=2000"]
  args += [f"--tokenizer={folder}/t.model", f"--output={out}", "--workers=1"]
  prepare.prepare(prepare.parse(args))


@pytest.fixture(scope="module")
def made(inputs, tmp_path_factory):
  out = tmp_path_factory.mktemp("out") / "store"
  run_prepare(inputs, out)
  return out


@pytest.fixture
def store(made, bucket):
  shutil.copytree(made, bucket / "store")
  return made


def open_it(name, cache):
  return open_source(name, vocab_size=0, cache_dir=str(cache))


def test_a_remote_store_is_copied_once_and_is_the_same(store, tmp_path, capsys):
  local = open_it(f"tokens:{store}", tmp_path / "cache")
  capsys.readouterr()
  found = open_it("tokens:gs://b/store", tmp_path / "cache")
  assert found.fingerprint == local.fingerprint
  assert found.train_documents == 70
  a, b = (s.validation(L=16, rows=50, mask_documents=False) for s in (found, local))
  np.testing.assert_array_equal(a.batch.inputs, b.batch.inputs)
  assert "copying" in capsys.readouterr().err
  opened.clear()
  open_it("tokens:gs://b/store", tmp_path / "cache")
  assert capsys.readouterr().err == ""
  assert not any("tokens" in path for path in opened)


def test_remote_input(inputs, made, bucket, tmp_path):
  """Workers get raw input from disk, so that only this process needs the storage."""
  shutil.copytree(inputs, bucket / "in")
  run_prepare("gs://b/in", tmp_path / "out")
  assert StoreReader(tmp_path / "out").fingerprint == StoreReader(made).fingerprint


def test_a_remote_tfds_data_set(store, tmp_path):
  local = open_it(f"tfds:{store}", tmp_path / "cache")
  found = open_it("tfds:gs://b/store", tmp_path / "cache")
  assert found.fingerprint == local.fingerprint


def test_a_new_version_under_the_same_address_is_copied_anew(store, bucket, tmp_path):
  first = open_it("tokens:gs://b/store", tmp_path / "cache")
  manifest = json.loads((bucket / "store/store.json").read_text())
  manifest["splits"]["train"] = manifest["splits"]["train"][:1]
  (bucket / "store/store.json").write_text(json.dumps(manifest))
  second = open_it("tokens:gs://b/store", tmp_path / "cache")
  assert second.train_documents < first.train_documents


def test_a_copy_that_broke_off_goes_on(store, tmp_path, monkeypatch):
  fetch = remote._fetch_file

  def failing(source, target, size):
    if "validation" in target.name:
      raise OSError("connection lost")
    fetch(source, target, size)

  with monkeypatch.context() as m, pytest.raises(UserError, match="connection lost"):
    m.setattr(remote, "_fetch_file", failing)
    open_it("tokens:gs://b/store", tmp_path / "cache")
  opened.clear()
  open_it("tokens:gs://b/store", tmp_path / "cache")
  assert not any("train-" in path for path in opened), "fetched again"


def test_a_damaged_copy_is_not_used(store, bucket, tmp_path):
  path = bucket / "store/train-00000.tokens"
  data = bytearray(path.read_bytes())
  data[3] ^= 1
  path.write_bytes(data)
  with pytest.raises(UserError, match=r"train-00000\.tokens does not match its checksum"):
    open_it("tokens:gs://b/store", tmp_path / "cache")
  data[3] ^= 1
  path.write_bytes(data)
  open_it("tokens:gs://b/store", tmp_path / "cache")


def test_too_little_space(store, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  with pytest.raises(UserError, match=r"GB in .*more than is free.*NANOSAM_CACHE"):
    open_it("tokens:gs://b/store", tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens:gs://b/none", "tfds:gs://b/none"])
def test_nothing_there(bucket, tmp_path, name):
  with pytest.raises(UserError, match="gs://b/none"):
    open_it(name, tmp_path / "cache")


def test_storage_that_needs_another_package(tmp_path, monkeypatch):
  def missing(name):
    raise ImportError("Please install gcsfs")

  monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", missing)
  with pytest.raises(UsageError, match=r"pip install -e '\.\[gcs\]'"):
    open_it("tokens:gs://b/store", tmp_path / "cache")
