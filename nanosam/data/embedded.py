"""The embedded corpus: English documentation that is part of every installation.

Docstrings of the standard library and of the distributions below, and pydoc's topics. The same
Python and package versions give the same documents on every machine.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path, PurePosixPath

from nanosam.data import docstrings
from nanosam.data.store import MANIFEST, StoreWriter
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.files import build_folder

FORMAT = 2  # raise it when the same packages give other documents or another store

# Direct dependencies and some of theirs. Changing the list changes the corpus and every result.
DISTRIBUTIONS = """
  absl-py clu etils flax fsspec grain jax ml-collections numpy optax orbax-checkpoint pydantic rich
  scipy sentencepiece tensorflow-datasets treescope wandb
""".split()
# Tests, copies of other projects, and parts of Python that some systems package separately.
_SKIPPED_DIRECTORIES = frozenset(
  """
  test tests testing __pycache__
  vendor vendored _vendor third_party extern externals
  site-packages dist-packages ensurepip idlelib lib2to3 lib-dynload tkinter turtledemo
  """.split()
)
_MIN_DOCUMENT_CHARS = 200
_MIN_ENTRY_CHARS = 40
_VALIDATION_ONE_IN = 20
_SHARED_WORDS = 8  # in a row, in training and in validation: not a coincidence but boilerplate
_READERS = 2


def build_embedded(cache_dir: str | os.PathLike[str], vocab_size: int) -> Path:
  """The directory of the corpus as a token store, built on first use."""
  versions = _versions()
  key = hashlib.sha256(json.dumps([FORMAT, vocab_size, versions]).encode()).hexdigest()[:12]
  final = Path(cache_dir).expanduser() / f"embedded-{vocab_size}-{key}"
  write = functools.partial(_write, vocab_size=vocab_size)
  return build_folder(final, MANIFEST, write, "building", "the embedded corpus")


def collect_documents() -> list[str]:
  """Every document once, in an order that depends on the texts alone."""
  files = [*_standard_library_files(), *_distribution_files()]
  seen: set[str] = set()
  documents = set()
  for entries in _read([path for _, path in sorted(files)]):
    fresh = []
    for heading, text in entries:
      # Inherited and generated docstrings repeat: the first in the order of file names counts.
      if len(text) >= _MIN_ENTRY_CHARS and text not in seen:
        seen.add(text)
        fresh.append(f"{heading}\n{text}" if heading else text)
    document = "\n\n".join(fresh) + "\n"
    # A lone surrogate in a string literal cannot be encoded.
    is_text = document.encode(errors="ignore").decode() == document
    if len(document) >= _MIN_DOCUMENT_CHARS and is_text:
      documents.add(document)
  return sorted(documents, key=_digest)


def is_validation(document: str) -> bool:
  return int.from_bytes(_digest(document)[-8:], "big") % _VALIDATION_ONE_IN == 0


def split_documents(documents: Iterable[str]) -> dict[str, list[str]]:
  """Training and validation, which share no boilerplate.

  Documentation repeats itself (parameters that many functions take, licences), and what training
  has seen word for word is no test: such lines are dropped from validation.
  """
  splits: dict[str, list[str]] = {"train": [], "validation": []}
  for document in documents:
    splits["validation" if is_validation(document) else "train"].append(document)
  wanted = {run for document in splits["validation"] for run in _runs(document.split())}
  shared = {run for document in splits["train"] for run in _runs(document.split()) if run in wanted}
  fresh = (_without(document, shared) for document in splits["validation"])
  splits["validation"] = [document for document in fresh if len(document) >= _MIN_DOCUMENT_CHARS]
  return splits


def _runs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
  return zip(*(words[i:] for i in range(_SHARED_WORDS)), strict=False)


def _without(document: str, shared: Set[tuple[str, ...]]) -> str:
  """A document without the lines that a shared run of words touches."""
  lines = document.split("\n")
  words: list[str] = []
  line_of: list[int] = []
  for number, line in enumerate(lines):
    words += line.split()
    line_of += [number] * (len(words) - len(line_of))
  dropped = set()
  for first, run in enumerate(_runs(words)):
    if run in shared:
      dropped.update(line_of[first : first + _SHARED_WORDS])
  return "\n".join(line for number, line in enumerate(lines) if number not in dropped)


def _write(directory: Path, vocab_size: int) -> None:
  splits = split_documents(collect_documents())
  tokenizer = train_tokenizer(splits["train"], vocab_size)
  writer, shards = StoreWriter(directory, tokenizer), {}
  for name, texts in splits.items():
    sizes = (len(text.encode()) for text in texts)
    documents = zip(tokenizer.encode_batch(texts), sizes, strict=True)
    shards[name] = [writer.write_shard(name, 0, documents)]
  writer.commit(shards)


def _read(paths: Sequence[str]) -> Iterator[list[docstrings.Entry]]:
  """The documents of all files in the order of `paths`, parsed in parallel."""
  command = [sys.executable, "-I", docstrings.__file__]
  shares = [paths[k::_READERS] for k in range(_READERS)]
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    outputs = [
      pool.submit(
        subprocess.check_output,
        command,
        input=json.dumps(share).encode(),
        start_new_session=True,  # ctrl-C is for this process alone
      )
      for share in shares
    ]
    parsed = [json.loads(output.result()) for output in outputs]
  for i in range(len(paths)):
    yield from parsed[i % _READERS][i // _READERS]


def _versions() -> dict[str, str]:
  versions = {"python": platform.python_version()}
  for name in DISTRIBUTIONS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


def _standard_library_files() -> Iterator[tuple[str, str]]:
  """Pairs of a name that is the same on every machine, and a path."""
  root = Path(sysconfig.get_path("stdlib"))
  for directory, subdirectories, names in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES]
    for name in names:
      path = Path(directory, name)
      relative = path.relative_to(root).as_posix()
      if _is_wanted(relative):
        yield f"python/{relative}", str(path)


def _distribution_files() -> Iterator[tuple[str, str]]:
  for name in DISTRIBUTIONS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      for file in importlib.metadata.files(name) or []:
        path = file.locate()
        if _is_wanted(file.as_posix()) and os.path.exists(path):
          yield f"{name}/{file.as_posix()}", str(path)


def _is_wanted(relative: str) -> bool:
  path = PurePosixPath(relative)
  return (
    path.suffix == ".py"
    and not path.name.startswith(("test_", "_sysconfigdata"))
    and not path.stem.endswith("_test")
    and not path.is_absolute()
    and not _SKIPPED_DIRECTORIES.intersection(path.parts)
    and ".." not in path.parts
  )


def _digest(document: str) -> bytes:
  return hashlib.sha256(document.encode()).digest()
