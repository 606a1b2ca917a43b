"""Reading ahead with Grain, and a check that all streams share."""

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
  """A worker ignores ctrl-C, which is for its parent, and exits when the parent does."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  exit_with_parent()


def check_fingerprint(state: Mapping[str, Any], fingerprint: str) -> None:
  if state["fingerprint"] != fingerprint:
    raise UserError(
      f"the checkpoint was made with data {state['fingerprint']}, this is {fingerprint} "
      "(other files, or for the embedded corpus other package versions); restore that data "
      "or use another workdir"
    )
