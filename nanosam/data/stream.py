"""What all streams of batches share: their position, and reading ahead with Grain."""

import abc
import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import grain
from absl import flags
from grain.sources import RandomAccessDataSource

from nanosam.data.batch import TOO_FEW_TOKENS, Batch, StreamOptions
from nanosam.data.packing import HostBatches
from nanosam.system.errors import UserError
from nanosam.system.processes import exit_with_parent


class Stream(abc.ABC):
  """This host's rows of each global batch, in global order."""

  def __init__(self, fingerprint: str, options: StreamOptions):
    self._fingerprint, self._options, self._step = fingerprint, options, 0
    self._iterator: grain.DatasetIterator | None = None

  def __iter__(self) -> "Stream":
    return self

  @abc.abstractmethod
  def __next__(self) -> Batch: ...

  @abc.abstractmethod
  def epoch(self) -> float:
    """Passes over the training split so far."""

  @abc.abstractmethod
  def _rest(self) -> RandomAccessDataSource:
    """What Grain reads, from the position on.

    This, instead of restoring Grain's own state, makes a restart O(1) and independent of the number
    of workers.
    """

  def _read(self) -> Any:
    """The next element of the data."""
    if self._iterator is None:
      self._iterator = _read_ahead(self._rest(), self._options.workers, self._options.prefetch)
    return next(self._iterator)

  def state(self) -> dict[str, Any]:
    """The position of the next batch, for JSON; `merge_states` merges those of all hosts."""
    return {"step": self._step, "fingerprint": self._fingerprint}

  def restore(self, state: Mapping[str, Any]) -> None:
    if state["fingerprint"] != self._fingerprint:
      raise UserError(
        f"the checkpoint was made with data {state['fingerprint']}, this is {self._fingerprint} "
        "(other files, or for the embedded corpus other package versions); restore that data "
        "or use another workdir"
      )
    self.close()
    self._step = int(state["step"])

  def close(self) -> None:
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None


class StoreStream(Stream):
  """A Stream whose only state is the step; `weights` is the hash of those of the documents."""

  def __init__(self, batches: HostBatches, fingerprint: str, weights: str = ""):
    super().__init__(fingerprint, batches.options)
    self._batches, self._weights = batches, weights

  def __next__(self) -> Batch:
    o, last = self._options, self._batches.last_step
    if self._step >= last:
      raise UserError(
        f"the training data ends after {last} steps of {o.batch_size} x {o.L}; " + TOO_FEW_TOKENS
      )
    batch = self._read()
    self._step += 1
    return batch

  def _rest(self) -> HostBatches:
    return dataclasses.replace(self._batches, first_step=self._step)

  def state(self) -> dict[str, Any]:
    return super().state() | ({"weights": self._weights} if self._weights else {})

  def restore(self, state: Mapping[str, Any]) -> None:
    if (theirs := state.get("weights", "")) != self._weights:
      raise UserError(
        f"the checkpoint was made with data.weights {theirs or 'unset'}, these are "
        f"{self._weights or 'unset'} (by the hash of the file): restore that file or use another "
        "workdir"
      )
    super().restore(state)

  def epoch(self) -> float:
    return self._step * self._options.batch_size / len(self._batches.rows)


def _read_ahead(
  source: RandomAccessDataSource, workers: int, prefetch: int
) -> grain.DatasetIterator:
  """The elements in order; `workers` processes, or one thread, read `prefetch` of them ahead."""
  elements = grain.MapDataset.source(source)
  if not workers:
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(elements.to_iter_dataset(options))
  if not flags.FLAGS.is_parsed():  # Grain's workers read flags, but this program has none
    flags.FLAGS.mark_as_parsed()
  # Pickled, because arrays would travel in shared memory, which leaks with a warning if a stream is
  # closed while some are on the way.
  in_order = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  pickled = elements.map(pickle.dumps).to_iter_dataset(in_order)
  ahead = grain.MultiprocessingOptions(
    num_workers=workers, per_worker_buffer_size=max(-(-prefetch // workers), 1)
  )
  return iter(pickled.mp_prefetch(ahead, _settle_worker).map(pickle.loads))


def _settle_worker(index: int, count: int) -> None:
  exit_with_parent()
