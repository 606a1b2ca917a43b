"""Reading ahead with Grain, and what streams have in common."""

import pickle
import signal
from collections.abc import Mapping
from typing import Any, Protocol

import grain
from absl import flags

from nanosam.system.errors import UserError
from nanosam.system.processes import exit_with_parent


class RandomAccess(Protocol):
  def __len__(self) -> int: ...
  def __getitem__(self, index: int) -> Any: ...


def read_ahead(source: RandomAccess, *, workers: int, prefetch: int) -> grain.DatasetIterator:
  """The elements in order, `prefetch` of them ahead, made by processes or by a thread."""
  elements = grain.MapDataset.source(source)
  if not workers:
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(elements.to_iter_dataset(options))
  if not flags.FLAGS.is_parsed():  # by a program that has none; Grain's workers read some
    flags.FLAGS.mark_as_parsed()
  # Pickled, because arrays would travel in shared memory, of which those on the way are lost with
  # a complaint when a stream is closed.
  in_order = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  pickled = elements.map(pickle.dumps).to_iter_dataset(in_order)
  ahead = grain.MultiprocessingOptions(
    num_workers=workers, per_worker_buffer_size=max(-(-prefetch // workers), 1)
  )
  return iter(pickled.mp_prefetch(ahead, _settle_worker).map(pickle.loads))


def _settle_worker(index: int, count: int) -> None:
  """A worker ends with its parent: not before, on a ctrl-C that reaches them all, and not after."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  exit_with_parent()


def check_fingerprint(state: Mapping[str, Any], fingerprint: str) -> None:
  if state["fingerprint"] != fingerprint:
    raise UserError(
      f"the checkpoint was made with data {state['fingerprint']}, this is {fingerprint} "
      "(other files, or other package versions under the embedded corpus); restore that data "
      "or start in another workdir"
    )
