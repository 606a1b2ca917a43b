"""A small corpus in files, and the command that prepares it."""

import gzip
import hashlib
import json
import random
import subprocess
import sys

from helpers.training import ROOT
from nanosam.data import prepare
from nanosam.data.store import StoreWriter

WORDS = "the quick brown fox jumps over lazy dogs while café owners count 漢字 and 😀".split()


def texts(count, seed=0):
  rng = random.Random(seed)
  return [f"Text {seed}/{i}. {' '.join(rng.choices(WORDS, k=60))}\n\nEnd." for i in range(count)]


def write_lines(path, documents):
  data = "".join(json.dumps({"text": t}) + "\n" for t in documents).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_store(directory, tokenizer, texts):
  """A token store with the same texts for training and validation; its name as a source."""
  writer = StoreWriter(directory, tokenizer)
  documents = [(tokenizer.encode(text), len(text.encode())) for text in texts]
  writer.commit({s: [writer.write_shard(s, 0, documents)] for s in ("train", "validation")})
  return f"tokens:{directory}"


TRAIN, VALIDATION = texts(400), texts(30, seed=1)


def arguments(inputs, out, *more):
  return [
    f"--input={inputs}/*.json*",
    f"--validation={inputs}/validation*",
    f"--output={out}",
    f"--tokenizer={inputs}/t.model",
    "--shard_bytes=20000",
    "--workers=1",
    *more,
  ]


def run(*args):
  return prepare.prepare(prepare.parse(args))


def start(
  *args, code="from nanosam.data.prepare import main; import sys; main(['', *sys.argv[1:]])"
):
  return subprocess.Popen(
    [sys.executable, "-c", code, *args],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )


def contents(directory):
  return {
    str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
    for p in sorted(directory.rglob("*"))
    if p.is_file() and p.name != "prepare.json"
  }


def documents_of(store, split):
  tokens, start, found = store.split(split), 0, []
  for length, num_bytes in tokens.documents():
    ids = tokens.read(start, start + length)
    assert (ids[0], ids[-1]) == (store.tokenizer.bos_id, store.tokenizer.eos_id)
    found.append(store.tokenizer.decode(ids[1:-1]))
    assert num_bytes == len(found[-1].encode())
    start += length
  assert start == tokens.num_tokens
  return found
