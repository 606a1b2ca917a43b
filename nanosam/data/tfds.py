"""TFDS data sets in ArrayRecord form, tokenised while training.

Documents are shuffled every epoch and distributed round-robin over the hosts; each host tokenises
and packs its own. Only tokenising tells how many documents fill a batch, so the batches depend on
the number of hosts, and a run must be resumed on the same number. A token store
(nanosam.data.prepare) has no such limit and needs no tokenising.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from nanosam.data.batch import TOO_FEW_TOKENS, Batch, EvalSet, StreamOptions
from nanosam.data.packing import (
  documents_that_fit,
  first_tokens,
  num_rows,
  pack_tokens,
  shuffled,
)
from nanosam.data.store import TEXT, TOKENIZER
from nanosam.data.stream import Stream
from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UsageError, UserError
from nanosam.system.remote import is_remote, local_copy, storage_errors

_INFO, _FEATURES = "dataset_info.json", "features.json"
_GROUP = 16  # documents tokenised together; positions in checkpoints count in groups
_SAMPLED = 256  # documents from which the number of tokens is estimated


def open_texts(directory: str, *, tokenizer: str, text_field: str, cache_dir: Path) -> "TfdsSource":
  model = _find_tokenizer(directory, tokenizer)
  directory = local(directory, cache_dir)
  builder = open_builder(directory)
  for split in ("train", "validation"):
    if split not in builder.info.splits:
      known = ", ".join(builder.info.splits)
      raise UserError(f"{directory} has no {split} split, only {known}")
  identity = {s: list(i.shard_lengths) for s, i in builder.info.splits.items()}
  train, validation = (Texts(directory, split, text_field) for split in ("train", "validation"))
  return TfdsSource(train, validation, model, identity)


def find(name: str, data_dir: str) -> str:
  """The directory of a data set, given itself, the output of `prepare`, or a name (c4/en:3.1.0)."""
  with storage_errors(name):
    for directory in (epath.Path(name).expanduser(), epath.Path(name).expanduser() / TEXT):
      if (directory / _INFO).exists():
        return os.fspath(directory)
    if is_remote(name):
      raise UserError(f"{name} is not a TFDS data set: it has no {_INFO}; check the path")
  from tensorflow_datasets.core import read_only_builder, registered

  try:
    return os.fspath(read_only_builder.builder_from_files(name, data_dir=data_dir or None).data_dir)
  except (registered.DatasetNotFoundError, ValueError, AssertionError) as e:
    raise UsageError(
      f"there is no TFDS data set {name} in {data_dir or 'the default data_dir'}: give its "
      "directory or data.data_dir, or make a store with python -m nanosam.data.prepare"
    ) from e


def holds_images(directory: str) -> bool:
  """Whether its examples have an image; without reading any."""
  file = epath.Path(directory) / _FEATURES
  with storage_errors(directory):
    features = json.loads(file.read_text()) if file.exists() else {}
  entries = features.get("featuresDict", {}).get("features", {}).values()
  return any(entry.get("pythonClassName", "").endswith(".Image") for entry in entries)


def open_builder(directory: str) -> Any:
  import tensorflow_datasets as tfds

  builder = tfds.builder_from_directory(directory)
  formats = {f.value for f in builder.info.available_file_formats()}
  if "array_record" not in formats:
    kind = ", ".join(sorted(formats)) or "an unknown form"
    if holds_images(directory):
      raise UsageError(
        f"{directory} is stored as {kind}, which cannot be shuffled; prepare it again with "
        "tfds.builder(NAME, file_format='array_record').download_and_prepare()"
      )
    files = f"{directory}/*-{{}}.{kind}*"
    raise UsageError(
      f"{directory} is stored as {kind}, which cannot be shuffled; convert it: "
      f"python -m nanosam.data.prepare --input='{files.format('train')}' "
      f"--validation='{files.format('validation')}' --output=DIR, and set data.source=tokens:DIR"
    )
  return builder


def _find_tokenizer(directory: str, tokenizer: str) -> Tokenizer:
  if tokenizer:
    return Tokenizer.load(tokenizer)
  path = epath.Path(directory)
  for place in (path, path.parent.parent):  # the latter in the output of `prepare`
    if (place / TOKENIZER).exists():
      return Tokenizer.load(place / TOKENIZER)
  raise UsageError(f"{directory} has no {TOKENIZER}: name one with data.tokenizer=FILE")


def local(directory: str, cache_dir: Path) -> str:
  """The directory itself, or a copy of a remote one."""
  if not is_remote(directory):
    return directory
  remote = epath.Path(directory)
  with storage_errors(directory):
    names = [p.name for p in remote.iterdir()]
    version = (remote / _INFO).read_bytes()
    copy = local_copy(remote, names, version=version, cache_dir=cache_dir, check=lambda copy: None)
  return os.fspath(copy)


@dataclasses.dataclass(frozen=True)
class Texts:
  """Random access to the texts of one split; pickled as its name."""

  directory: str
  split: str
  text_field: str

  @functools.cached_property
  def _source(self) -> Any:
    return open_builder(self.directory).as_data_source(self.split)

  def __reduce__(self):
    return Texts, (self.directory, self.split, self.text_field)

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: Sequence[int]) -> list[str]:
    return [
      self._text(i, x) for i, x in zip(indices, self._source.__getitems__(indices), strict=True)
    ]

  def _text(self, index: int, example: Mapping[str, Any]) -> str:
    where = f"{self.directory}: document {index} of {self.split}"
    value = example.get(self.text_field)
    if not isinstance(value, bytes):
      raise UserError(
        f"{where} has no text in field {self.text_field!r}: set data.text_field to one of "
        f"{', '.join(example)}"
      )
    try:
      return value.decode()
    except UnicodeDecodeError as e:
      raise UserError(f"{where} is not valid UTF-8; prepare the data without it") from e


def _framed(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
  bos, eos = (np.asarray([i], np.int32) for i in (tokenizer.bos_id, tokenizer.eos_id))
  return [np.concatenate([bos, tokenizer.encode_array(text), eos]) for text in texts]


class TfdsSource:
  """A TextSource that tokenises on the fly."""

  image_size = 0
  weights = None

  def __init__(
    self, train: Texts, validation: Texts, tokenizer: Tokenizer, identity: dict[str, Any]
  ):
    self.tokenizer = tokenizer
    self.coding, self.outputs = tokenizer.sha256, tokenizer.vocab_size
    self._train, self._validation = train, validation
    if not len(train):
      raise UserError(f"{train.directory} has no training documents; prepare the data again")
    sampled = min(_SAMPLED, len(train))
    texts = train.read([i * len(train) // sampled for i in range(sampled)])
    lengths = np.asarray([len(t) for t in _framed(tokenizer, texts)])
    digest = hashlib.sha256(json.dumps([identity, tokenizer.sha256, train.text_field]).encode())
    digest.update(json.dumps(texts).encode())
    self.fingerprint = digest.hexdigest()[:16]
    self._tokens_per_document = float(lengths.mean())
    self._most_tokens = len(train) * (lengths.mean() + 4 * lengths.std() / sampled**0.5)
    self.train_tokens = round(len(train) * self._tokens_per_document)  # an estimate
    self.train_bytes = round(len(train) * np.mean([len(t.encode()) for t in texts]))
    self.train_documents = len(train)

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    needed = steps * batch_size * L
    if needed > self._most_tokens and not repeat:
      raise UserError(
        f"the training data has about {self.train_tokens} tokens, but {steps} steps of "
        f"{batch_size} x {L} ({needed} tokens) were asked for; {TOO_FEW_TOKENS}"
      )

  def train_stream(self, options: StreamOptions) -> "TfdsStream":
    o, rows = options, options.rows
    if not len(rows) or rows.step != 1 or o.batch_size % len(rows) or rows.start % len(rows):
      raise ValueError(f"{rows} are not one host's equal share of a batch of {o.batch_size}")
    groups = Groups(self._train, self.tokenizer, o)
    groups_per_batch = len(rows) * o.L / (_GROUP * self._tokens_per_document)
    prefetch = int(np.ceil(o.prefetch * groups_per_batch))
    return TfdsStream(groups, self.fingerprint, o._replace(prefetch=prefetch))

  def independent_rows(self, L: int) -> int:
    return min(num_rows(self.train_tokens, L), self.train_documents)

  def validation(
    self, *, L: int, rows: int, mask_documents: bool, eval_rows: str = "packed"
  ) -> EvalSet:
    if eval_rows == "documents":
      texts = self._validation.read(range(min(rows, len(self._validation))))
      whole = _framed(self.tokenizer, texts)
      table = np.array([(len(ids), len(t.encode())) for ids, t in zip(whole, texts, strict=True)])
      return first_tokens([ids[:L] for ids in whole], table, L=L, tokenizer=self.tokenizer)
    tokens: list[np.ndarray] = []
    num_bytes: list[int] = []
    for start in range(0, len(self._validation), _GROUP):
      if sum(map(len, tokens)) > rows * L + 1:
        break
      texts = self._validation.read(range(start, min(start + _GROUP, len(self._validation))))
      tokens += _framed(self.tokenizer, texts)
      num_bytes += [len(t.encode()) for t in texts]
    documents = documents_that_fit(np.asarray([len(t) for t in tokens], np.int64), rows, L)
    batch = pack_tokens(
      np.concatenate(tokens[:documents]),
      L=L,
      tokenizer=self.tokenizer,
      mask_documents=mask_documents,
    )
    return EvalSet(batch, sum(num_bytes[:documents]), documents)


@dataclasses.dataclass(frozen=True)
class Groups:
  """One host's documents, tokenised in groups: what Grain reads."""

  texts: Texts
  tokenizer: Tokenizer
  options: StreamOptions
  first: int = 0  # the group at index 0

  @property
  def host(self) -> int:
    return self.options.rows.start // len(self.options.rows)

  @property
  def hosts(self) -> int:
    return self.options.batch_size // len(self.options.rows)

  def __len__(self) -> int:
    documents = len(range(self.host, len(self.texts), self.hosts))
    return (sys.maxsize if self.options.repeat else -(-documents // _GROUP)) - self.first

  def __getitem__(self, index: int) -> np.ndarray:
    first = (self.first + index) * _GROUP * self.hosts + self.host
    positions = range(first, first + _GROUP * self.hosts, self.hosts)
    size, o = len(self.texts), self.options
    chosen = [shuffled(p, size, o.data_seed) for p in positions if o.repeat or p < size]
    return np.concatenate(_framed(self.tokenizer, self.texts.read(chosen)))


class TfdsStream(Stream):
  """A Stream whose state is a position in the host's tokens: a group, and a token within it."""

  def __init__(self, groups: Groups, fingerprint: str, options: StreamOptions):
    """`options.prefetch` counts groups."""
    super().__init__(fingerprint, options)
    self._groups = groups
    self._buffer: collections.deque[np.ndarray] = collections.deque()  # from the position on
    self._group = self._offset = 0

  def __next__(self) -> Batch:
    o = self._options
    size = len(o.rows) * o.L
    self._fill(size + 1)  # consecutive batches share one token: the last target is the next input
    tokens = np.concatenate(self._buffer)[: size + 1]
    self._advance(size)
    self._step += 1
    return pack_tokens(
      tokens, L=o.L, tokenizer=self._groups.tokenizer, mask_documents=o.mask_documents
    )

  def _fill(self, num_tokens: int) -> None:
    buffered = sum(map(len, self._buffer))
    while buffered < num_tokens:
      try:
        tokens = self._read()
      except StopIteration:
        raise UserError(
          f"the training data ends after {self._step} steps; {TOO_FEW_TOKENS}"
        ) from None
      if not self._buffer:
        tokens = tokens[self._offset :]
      self._buffer.append(tokens)
      buffered += len(tokens)

  def _rest(self) -> Groups:
    return dataclasses.replace(self._groups, first=self._group)

  def _advance(self, num_tokens: int) -> None:
    while num_tokens >= len(self._buffer[0]):
      num_tokens -= len(self._buffer.popleft())
      self._group, self._offset = self._group + 1, 0
    self._buffer[0] = self._buffer[0][num_tokens:]
    self._offset += num_tokens

  def state(self) -> dict[str, Any]:
    return {
      **super().state(),
      "hosts": self._groups.hosts,
      "positions": {str(self._groups.host): [self._group, self._offset]},
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    super().restore(state)
    hosts = self._groups.hosts
    if state["hosts"] != hosts:
      raise UserError(
        f"the checkpoint was made by {state['hosts']} host(s), this run has {hosts}: text that is "
        "tokenised on the fly is divided among the hosts, so their number must not change; resume "
        f"on {state['hosts']}, or train from a token store (python -m nanosam.data.prepare)"
      )
    position = state["positions"].get(str(self._groups.host))
    if position is None:
      raise UserError(
        f"the checkpoint has no data position for host {self._groups.host}; start over"
      )
    self._group, self._offset = map(int, position)

  def epoch(self) -> float:
    return self._group * _GROUP * self._groups.hosts / len(self._groups.texts)

  def close(self) -> None:
    super().close()
    self._buffer.clear()
