"""What a run has cost so far, and how fast it is."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Cost:
  """Everything spent on training, over all restarts; saved with each checkpoint."""

  tokens: int = 0
  compute: float = 0.0  # FLOPs
  time: float = 0.0  # seconds, without compiling, evaluating and saving


class Meter:
  """Adds up the cost, and measures the speed between two readings."""

  def __init__(self, cost: Cost, peak_flops: float | None):
    self.cost = cost
    self._peak_flops = peak_flops
    self._running_since = time.perf_counter()
    self._data_wait = 0.0
    self._steps = 0
    self._last = dataclasses.replace(cost)

  @contextlib.contextmanager
  def waiting_for_data(self) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self._data_wait += time.perf_counter() - start

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """For what is not training."""
    self._book_time()
    yield
    self._running_since = time.perf_counter()

  def _book_time(self) -> None:
    now = time.perf_counter()
    self.cost.time += now - self._running_since
    self._running_since = now

  def step(self, tokens: int, flops: float) -> None:
    self.cost.tokens += tokens
    self.cost.compute += flops
    self._steps += 1

  def read(self) -> dict[str, float]:
    """Cost so far, and the speed since the last reading."""
    self._book_time()
    seconds = max(self.cost.time - self._last.time, 1e-9)
    steps = max(self._steps, 1)
    flops_per_sec = (self.cost.compute - self._last.compute) / seconds
    values = {
      **dataclasses.asdict(self.cost),
      "perf/tokens_per_sec": (self.cost.tokens - self._last.tokens) / seconds,
      "perf/step_time": seconds / steps,
      "perf/data_wait": self._data_wait / steps,
      "perf/flops_per_sec": flops_per_sec,
    }
    if self._peak_flops:
      values["perf/utilization"] = flops_per_sec / self._peak_flops
    self._last, self._data_wait, self._steps = dataclasses.replace(self.cost), 0.0, 0
    return values
