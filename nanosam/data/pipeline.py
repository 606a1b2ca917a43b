"""Sources of batches: the global batch of a step is a function of (data_seed, step) alone.

It does not depend on hosts, workers or restarts, and each host reads only its own rows of it.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from nanosam.data.batch import Batch, EvalSet
from nanosam.data.corpus import build_embedded
from nanosam.data.packing import HostBatches, num_rows, pack_rows
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import Tokenizer
from nanosam.errors import UsageError, UserError


class Stream(Protocol):
  """This host's rows of each global batch, in global order."""

  def __iter__(self) -> Iterator[Batch]: ...
  def __next__(self) -> Batch: ...
  def state(self) -> dict[str, Any]:
    """The position of the next batch, fit for JSON."""
    ...

  def restore(self, state: Mapping[str, Any]) -> None: ...
  def epoch(self) -> float:
    """Passes over the training split so far."""
    ...

  def close(self) -> None: ...


class Source(Protocol):
  """Tokenised text with a training and a validation split."""

  tokenizer: Tokenizer
  fingerprint: str  # names exactly these tokens
  train_tokens: int

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    """Raises a UserError if training would run out of data."""

  def train_stream(
    self,
    *,
    L: int,
    batch_size: int,
    rows: range,
    data_seed: int,
    repeat: bool,
    mask_documents: bool,
    workers: int,
    prefetch: int,
  ) -> Stream:
    """`rows`: which rows of the global batch this host makes; it reads nothing else."""
    ...

  def validation(self, *, L: int, rows: int, mask_documents: bool) -> EvalSet:
    """A fixed set of whole documents in at most `rows` rows."""
    ...


def open_source(source: str, *, vocab_size: int, cache_dir: str) -> Source:
  """Opens "embedded" or "tokens:DIR"; a prepared store brings its own vocabulary."""
  kind, _, argument = source.partition(":")
  if source == "embedded":
    store = StoreReader(build_embedded(cache_dir or default_cache_dir(), vocab_size))
    store.verify()  # Small enough to check every byte at each start.
    return StoreSource(store)
  if kind == "tokens" and argument:
    return StoreSource(StoreReader(argument))
  raise UsageError(f"unknown data source {source!r}; known are 'embedded' and 'tokens:DIR'")


def default_cache_dir() -> Path:
  if directory := os.environ.get("NANOSAM_CACHE"):
    return Path(directory)
  return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanosam"


class StoreSource:
  """A Source over a packed token store."""

  def __init__(self, store: StoreReader):
    self.tokenizer = store.tokenizer
    self.fingerprint = store.fingerprint
    self._train = store.split("train")
    self._validation = store.split("validation")
    self.train_tokens = self._train.num_tokens
    if self.train_tokens < 2:
      raise UserError(f"{store.directory} has no training tokens; prepare the data again")

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    most = self._whole_batches(L, batch_size)
    if steps > most and not repeat:
      raise UserError(
        f"the training data has {self.train_tokens} tokens, enough for {most} steps of "
        f"{batch_size} x {L}, but {steps} steps ({steps * batch_size * L} tokens) were asked for; "
        "train for fewer steps, bring more data, or allow repeating it"
      )

  def train_stream(
    self,
    *,
    L: int,
    batch_size: int,
    rows: range,
    data_seed: int,
    repeat: bool,
    mask_documents: bool,
    workers: int,
    prefetch: int,
  ) -> "StoreStream":
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch_size:
      raise ValueError(f"{rows} are not rows of a batch of {batch_size}")
    batches = HostBatches(
      split=self._train,
      tokenizer=self.tokenizer,
      L=L,
      batch_size=batch_size,
      host_rows=rows,
      data_seed=data_seed,
      mask_documents=mask_documents,
      first_step=0,
      last_step=sys.maxsize if repeat else self._whole_batches(L, batch_size),
    )
    return StoreStream(batches, self.fingerprint, workers=workers, prefetch=prefetch)

  def validation(self, *, L: int, rows: int, mask_documents: bool) -> EvalSet:
    table = self._validation.documents()
    targets_so_far = table[:, 0].cumsum() - 1
    documents = int(np.searchsorted(targets_so_far, rows * L, side="right"))
    if not documents:
      first = f"; the first needs {targets_so_far[0]}" if len(table) else ""
      raise UserError(
        f"{rows} rows of {L} tokens hold no validation document{first}: evaluate on more rows"
      )
    num_tokens, num_bytes = (int(n) for n in table[:documents].sum(0))
    batch = pack_rows(
      self._validation,
      range(num_rows(num_tokens, L)),
      L=L,
      num_tokens=num_tokens,
      tokenizer=self.tokenizer,
      mask_documents=mask_documents,
    )
    return EvalSet(batch, num_bytes, documents)

  def _whole_batches(self, L: int, batch_size: int) -> int:
    return num_rows(self.train_tokens, L) // batch_size


class StoreStream:
  """A Stream whose whole state is the step; Grain reads ahead of it."""

  def __init__(self, batches: HostBatches, fingerprint: str, *, workers: int, prefetch: int):
    self._batches = batches
    self._fingerprint = fingerprint
    self._workers = workers
    self._prefetch = prefetch
    self._step = 0
    self._iterator: grain.DatasetIterator | None = None

  def __iter__(self) -> "StoreStream":
    return self

  def __next__(self) -> Batch:
    if self._step >= self._batches.last_step:
      b = self._batches
      raise UserError(
        f"the training data ends after {b.last_step} steps of {b.batch_size} x {b.L} tokens; "
        "train for fewer steps, bring more data, or allow repeating it"
      )
    if self._iterator is None:
      self._iterator = self._open()
    arrays = next(self._iterator)
    self._step += 1
    return Batch(**{"segments_BxL": None, **arrays})

  def state(self) -> dict[str, Any]:
    return {"step": self._step, "fingerprint": self._fingerprint}

  def restore(self, state: Mapping[str, Any]) -> None:
    if state["fingerprint"] != self._fingerprint:
      raise UserError(
        f"the checkpoint was made with data {state['fingerprint']}, this is {self._fingerprint} "
        "(other files, or other package versions under the embedded corpus); restore that data "
        "or start in another workdir"
      )
    self.close()
    self._step = int(state["step"])

  def epoch(self) -> float:
    return self._step * self._batches.batch_size / self._batches.rows_per_epoch

  def close(self) -> None:
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None

  def _open(self) -> grain.DatasetIterator:
    # Beginning at the step, rather than restoring Grain's own state, makes a restart O(1) and
    # independent of the number of workers.
    rest = dataclasses.replace(self._batches, first_step=self._step)
    ahead = grain.ReadOptions(
      num_threads=0 if self._workers else min(self._prefetch, 1),
      prefetch_buffer_size=0 if self._workers else self._prefetch,
    )
    dataset = grain.MapDataset.source(rest).to_iter_dataset(ahead)
    if self._workers:
      if not flags.FLAGS.is_parsed():  # by a program that has none; Grain's workers read some
        flags.FLAGS.mark_as_parsed()
      dataset = dataset.mp_prefetch(
        grain.MultiprocessingOptions(
          num_workers=self._workers, per_worker_buffer_size=max(self._prefetch, 1)
        )
      )
    return iter(dataset)
