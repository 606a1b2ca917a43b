"""The token store: a directory of tokens with random access.

    store.json                  the manifest; written last, so it marks the store as complete
    tokenizer.model
    train-00000.tokens          flat little-endian ids (uint16, or uint32 for a large vocabulary)
    train-00000.documents       uint32 pairs: tokens and UTF-8 bytes of each document
    validation-00000.tokens ...

Every document is stored as bos + ids + eos. The shards of a split form one stream of tokens.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from nanosam.data.tokenizer import Tokenizer, token_dtype
from nanosam.system.errors import UserError
from nanosam.system.files import PARTIAL, write_atomically

FORMAT = 1
MANIFEST = "store.json"
TOKENIZER = "tokenizer.model"
TEXT = "text/1.0.0"  # beside the tokens, if `prepare` made them: the documents as a TFDS data set
_TABLE_DTYPE = np.dtype("<u4")
_AGAIN = "; delete the directory and make it again"


@dataclasses.dataclass(frozen=True)
class Shard:
  """One entry of store.json."""

  name: str
  tokens: int
  documents: int
  bytes: int
  sha256: str
  documents_sha256: str


class StoreWriter:
  """Writes a store; different processes may write different shards.

  A shard gets its name when it is complete, its .tokens file last. `commit` completes the store.
  """

  def __init__(self, directory: epath.PathLike, tokenizer: Tokenizer):
    self.directory = epath.Path(directory)
    self._tokenizer = tokenizer
    if (self.directory / MANIFEST).exists():
      raise UserError(f"{directory} already holds a token store; delete it or choose another")
    self.directory.mkdir(parents=True, exist_ok=True)

  def write_shard(
    self, split: str, number: int, documents: Iterable[tuple[Sequence[int], int]]
  ) -> Shard:
    """Writes documents given as (ids without bos and eos, UTF-8 bytes)."""
    shard = ShardWriter(self.directory, f"{split}-{number:05d}", self._tokenizer)
    for ids, num_bytes in documents:
      shard.add(ids, num_bytes)
    return shard.commit()

  def commit(self, splits: Mapping[str, Sequence[Shard]]) -> None:
    write_atomically(self.directory / TOKENIZER, self._tokenizer.model_bytes)
    manifest = {
      "format": FORMAT,
      "dtype": token_dtype(self._tokenizer.vocab_size).name,
      "vocab_size": self._tokenizer.vocab_size,
      "tokenizer_sha256": self._tokenizer.sha256,
      "splits": {s: [dataclasses.asdict(x) for x in shards] for s, shards in splits.items()},
    }
    write_atomically(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())


class ShardWriter:
  """Writes one shard, document by document."""

  def __init__(self, directory: epath.Path, name: str, tokenizer: Tokenizer):
    self._directory, self._name, self._tokenizer = directory, name, tokenizer
    self._dtype = token_dtype(tokenizer.vocab_size)
    self._table: list[tuple[int, int]] = []
    self._digest = hashlib.sha256()
    self._file = self._path("tokens" + PARTIAL).open("wb")

  def add(self, ids: Sequence[int] | np.ndarray, num_bytes: int) -> None:
    """Adds a document: its ids without bos and eos, and its UTF-8 bytes."""
    ids = np.asarray(ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
      raise UserError(
        f"a document has token {ids.max()}, outside the vocabulary of "
        f"{self._tokenizer.vocab_size}; use the tokenizer that made the tokens"
      )
    document = np.empty(len(ids) + 2, self._dtype)
    document[0], document[1:-1], document[-1] = self._tokenizer.bos_id, ids, self._tokenizer.eos_id
    self._digest.update(document.data)
    self._file.write(document.data)
    self._table.append((len(document), num_bytes))

  def commit(self) -> Shard:
    self._file.close()
    counts = np.asarray(self._table, np.int64).reshape(-1, 2)
    table_bytes = counts.astype(_TABLE_DTYPE).tobytes()
    write_atomically(self._path("documents"), table_bytes)
    self._path("tokens" + PARTIAL).replace(self._path("tokens"))
    tokens, num_bytes = (int(n) for n in counts.sum(0))
    return Shard(
      name=self._name,
      tokens=tokens,
      documents=len(self._table),
      bytes=num_bytes,
      sha256=self._digest.hexdigest(),
      documents_sha256=hashlib.sha256(table_bytes).hexdigest(),
    )

  def _path(self, suffix: str) -> epath.Path:
    return self._directory / f"{self._name}.{suffix}"


class Split:
  """The tokens of one split as a single stream; memory-mapped, picklable."""

  def __init__(self, directory: epath.Path, shards: Sequence[Shard], dtype: np.dtype):
    self._directory = directory
    self._dtype = dtype
    self._shards = [s for s in shards if s.tokens]  # An empty file cannot be mapped.
    self._starts = np.cumsum([0] + [s.tokens for s in self._shards])
    self.num_tokens = sum(s.tokens for s in self._shards)
    self.num_documents = sum(s.documents for s in self._shards)
    self.num_bytes = sum(s.bytes for s in self._shards)
    for shard in self._shards:
      _check_size(self._file(shard, "tokens"), shard.tokens * dtype.itemsize)
      _check_size(self._file(shard, "documents"), shard.documents * 2 * _TABLE_DTYPE.itemsize)
    self._maps = [np.memmap(self._file(s, "tokens"), dtype, "r") for s in self._shards]

  def __reduce__(self):  # without the maps
    return Split, (self._directory, self._shards, self._dtype)

  def read(self, start: int, stop: int) -> np.ndarray:
    """Tokens start..stop-1 of the stream; fewer if it ends before."""
    first = int(np.searchsorted(self._starts, start, side="right")) - 1
    parts = []
    for k in range(first, len(self._maps)):
      offset = int(self._starts[k])
      if offset >= stop:
        break
      parts.append(self._maps[k][max(start - offset, 0) : stop - offset])
    return np.concatenate(parts) if parts else np.empty(0, self._dtype)

  def documents(self) -> np.ndarray:
    """[documents, 2]: tokens (with bos and eos) and bytes of each, in stream order."""
    none = np.empty((0, 2), _TABLE_DTYPE)
    return np.concatenate([*self.tables(), none]).astype(np.int64)

  def tables(self) -> Iterator[np.ndarray]:
    """The same shard by shard, memory-mapped: a large store has many documents."""
    yield from map(self._table, self._shards)

  def _table(self, shard: Shard) -> np.ndarray:
    return np.memmap(self._file(shard, "documents"), _TABLE_DTYPE, "r").reshape(-1, 2)

  def ends(self, start: int, stop: int) -> tuple[int, np.ndarray]:
    """Where the documents end that end in (start, stop], and the number of the first of them."""
    first, found = 0, [np.empty(0, np.int64)]
    for shard, offset in zip(self._shards, self._starts, strict=False):
      if offset >= stop:
        break
      if offset + shard.tokens <= start:
        first += shard.documents
        continue
      ends = offset + np.cumsum(self._table(shard)[:, 0], dtype=np.int64)
      low, high = np.searchsorted(ends, (start, stop), side="right")
      first += int(low) if len(found) == 1 else 0
      found.append(ends[low:high])
    return first, np.concatenate(found)

  def verify(self) -> None:
    for shard in self._shards:
      check_sha256(self._file(shard, "tokens"), shard.sha256)
      check_sha256(self._file(shard, "documents"), shard.documents_sha256)

  def _file(self, shard: Shard, suffix: str) -> epath.Path:
    return self._directory / f"{shard.name}.{suffix}"


def check_sha256(path: epath.Path, sha256: str) -> None:
  with path.open("rb") as f:
    if hashlib.file_digest(f, "sha256").hexdigest() != sha256:
      raise UserError(f"{path} does not match its checksum{_AGAIN}")


def _check_size(path: epath.Path, size: int) -> None:
  try:
    found = path.stat().length
  except OSError as e:
    raise UserError(f"{path} is missing or unreadable{_AGAIN}") from e
  if found != size:
    raise UserError(f"{path} has {found} bytes instead of {size}{_AGAIN}")


class StoreReader:
  """Opens a complete store; checks names and sizes, and with `verify` every byte."""

  def __init__(self, directory: epath.PathLike):
    self.directory = epath.Path(directory).expanduser()
    manifest = read_manifest(self.directory)
    try:
      self.vocab_size = int(manifest["vocab_size"])
      self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
      self.splits = {
        name: [Shard(**shard) for shard in shards] for name, shards in manifest["splits"].items()
      }
      tokenizer_sha256 = manifest["tokenizer_sha256"]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
      raise UserError(f"{self.directory / MANIFEST} is damaged ({e!r}){_AGAIN}") from e
    self.tokenizer = Tokenizer.load(self.directory / TOKENIZER)
    if self.tokenizer.sha256 != tokenizer_sha256:
      raise UserError(
        f"{self.directory / TOKENIZER} is not the tokenizer that made this store{_AGAIN}"
      )
    if self.vocab_size != self.tokenizer.vocab_size or self._dtype != token_dtype(self.vocab_size):
      raise UserError(
        f"{self.directory / MANIFEST} says {self._dtype.name} for {self.vocab_size} pieces, which "
        f"does not match the tokenizer's {self.tokenizer.vocab_size}{_AGAIN}"
      )

  @property
  def fingerprint(self) -> str:
    """Identifies these tokens in this order, wherever the store is."""
    shards = {k: [(s.sha256, s.documents_sha256) for s in v] for k, v in self.splits.items()}
    identity = [FORMAT, self._dtype.name, self.tokenizer.sha256, sorted(shards.items())]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

  def split(self, name: str) -> Split:
    if name not in self.splits:
      raise UserError(
        f"{self.directory} has no {name} split, only {', '.join(self.splits) or 'none'}"
      )
    return Split(self.directory, self.splits[name], self._dtype)

  def verify(self) -> None:
    """Reads everything and compares checksums."""
    for name in self.splits:
      self.split(name).verify()


def read_manifest(directory: epath.Path) -> dict[str, Any]:
  path = directory / MANIFEST
  try:
    manifest = json.loads(path.read_bytes())
  except FileNotFoundError as e:
    raise UserError(
      f"{directory} is not a complete token store: it has no {MANIFEST}; check the path, or "
      "prepare the data again"
    ) from e
  except (OSError, ValueError) as e:
    raise UserError(f"cannot read {path} ({e}){_AGAIN}") from e
  if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
    raise UserError(f"{path} is not of format {FORMAT}, which this version reads{_AGAIN}")
  return manifest
