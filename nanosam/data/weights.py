"""Weights of documents: how often an epoch shows each document of a token store.

`python -m nanosam.data.difficulty` writes them to a file, `data.weights` names it. The training
split is then read in passes: the first has every document, pass k those with at least k copies, and
the last one documents that are not in the store, if there are any. Every pass begins with a row of
its own, so that no row holds two copies of a document, and the first pass has the store's own rows.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from nanosam.data.packing import Tokens
from nanosam.data.store import Split
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically

MAX_COPIES = 255  # in a byte
_COMMAND = "python -m nanosam.data.difficulty"
_DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)


class Extra(NamedTuple):
  """Documents that are not in the store, as one stream of tokens; a `Tokens`."""

  tokens: np.ndarray  # of all documents, each with bos and eos
  documents: np.ndarray  # [E, 2]: tokens and bytes of each

  @classmethod
  def of(cls, documents: Sequence[tuple[np.ndarray, int]]) -> "Extra":
    """From (ids with bos and eos, bytes)."""
    table = [(len(ids), num_bytes) for ids, num_bytes in documents]
    ids = [np.empty(0, np.int32), *(ids.astype(np.int32) for ids, _ in documents)]
    return cls(np.concatenate(ids), np.asarray(table, np.int64).reshape(-1, 2))

  @property
  def num_tokens(self) -> int:
    return len(self.tokens)

  @property
  def num_documents(self) -> int:
    return len(self.documents)

  @property
  def num_bytes(self) -> int:
    return int(self.documents[:, 1].sum())

  def read(self, start: int, stop: int) -> np.ndarray:
    return self.tokens[start:stop]


class Weights(NamedTuple):
  copies_D: np.ndarray  # uint8, by document of the training split
  hard_D: np.ndarray  # bool: the cluster of each
  extra: Extra
  facts: dict[str, Any]  # for JSON: what they were made for, of and by

  @property
  def hash(self) -> str:
    """Identifies the stream that these weights make of their store."""
    digest = hashlib.sha256(self.facts["store"].encode())
    for array in (self.copies_D, self.extra.tokens, self.extra.documents):
      digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]

  @property
  def flops(self) -> float:
    """Spent before training begins: on the proxy, and on its losses."""
    return float(sum(self.facts["flops"].values()))

  def summary(self) -> dict[str, Any]:
    """What a run records about them."""
    names = ("feature", "choose", "copies", "steps", "flops")
    return {"hash": self.hash, **{name: self.facts[name] for name in names}}

  def save(self, path: epath.Path) -> None:
    content = io.BytesIO()
    np.savez_compressed(
      content,
      copies=self.copies_D,
      hard=self.hard_D,
      extra_tokens=self.extra.tokens,
      extra_documents=self.extra.documents,
      facts=json.dumps({**self.facts, "hash": self.hash}),
    )
    write_atomically(path, content.getvalue())


def read_weights(name: str) -> Weights:
  path = epath.Path(name).expanduser()
  try:
    content = io.BytesIO(path.read_bytes())
  except OSError as e:
    raise UserError(
      f"cannot read data.weights={name}: {e.strerror or e}; check the path, or make it with "
      f"{_COMMAND}"
    ) from e
  try:
    with np.load(content) as f:
      extra = Extra(f["extra_tokens"], f["extra_documents"])
      found = Weights(f["copies"], f["hard"], extra, json.loads(str(f["facts"])))
    if found.hash != found.facts["hash"]:
      raise ValueError("it does not match its hash")
  except _DAMAGED as e:
    raise UserError(
      f"data.weights={name} is damaged or no file of weights ({e}); make it again with {_COMMAND}"
    ) from e
  return found


def passes(split: Split, fingerprint: str, weights: Weights) -> tuple[Tokens, ...]:
  """What an epoch consists of, one stream of tokens after the other."""
  copies_D, store = weights.copies_D, weights.facts["store"]
  if store != fingerprint or len(copies_D) != split.num_documents:
    raise UserError(
      f"data.weights were made for the store {store} of {len(copies_D)} documents, this one is "
      f"{fingerprint} of {split.num_documents}: set data.source to that store, or make weights for "
      f"this one with {_COMMAND}"
    )
  again = [Chosen(split, copies_D >= k) for k in range(2, int(copies_D.max(initial=0)) + 1)]
  first: Tokens = split if copies_D.all() else Chosen(split, copies_D >= 1)
  return (first, *again, *([weights.extra] if weights.extra.num_documents else []))


class Chosen:
  """Some documents of a split as one stream of tokens; picklable."""

  def __init__(self, split: Split, chosen_D: np.ndarray):
    self._split = split
    self.num_documents, self.num_bytes = int(chosen_D.sum()), 0
    starts, stops = [], []  # in the split, of stretches of consecutive documents
    document = token = 0
    for table in split.tables():
      mine = chosen_D[document : document + len(table)]
      edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]])))
      borders = token + np.concatenate([[0], np.cumsum(table[:, 0], dtype=np.int64)])
      starts.append(borders[edges[::2]])
      stops.append(borders[edges[1::2]])
      self.num_bytes += int(table[mine, 1].sum(dtype=np.int64))
      document, token = document + len(table), int(borders[-1])
    self._starts = np.concatenate(starts)
    lengths = np.concatenate(stops) - self._starts
    self._ends = np.cumsum(lengths)  # in this stream
    self._shift = self._starts - (self._ends - lengths)  # from this stream to the split
    self.num_tokens = int(self._ends[-1]) if len(lengths) else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    parts, stop = [], min(stop, self.num_tokens)
    k = int(np.searchsorted(self._ends, start, side="right"))
    while start < stop:
      end, shift = min(stop, int(self._ends[k])), int(self._shift[k])
      parts.append(self._split.read(start + shift, end + shift))
      start, k = end, k + 1
    return np.concatenate(parts) if parts else self._split.read(0, 0)
