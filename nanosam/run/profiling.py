"""A trace of a few steps, for TensorBoard or https://ui.perfetto.dev."""

import os
import pathlib
import re
from collections.abc import Callable
from typing import TypeVar

import jax

from nanosam.system.errors import UsageError

FOLDER = "profile"
T = TypeVar("T")


def parse_steps(text: str) -> range:
  """ "10-15" is steps 10 to 15, "10" is step 10 alone, "" is none."""
  if not text:
    return range(0)
  match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
  first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
  if not 1 <= first <= last:
    raise UsageError(f"profile_steps={text}: write FIRST-LAST, as in 10-15, counted from step 1")
  return range(first, last + 1)


class Profiler:
  """Traces the steps of `parse_steps(steps)` into workdir/profile."""

  def __init__(
    self, workdir: str | os.PathLike[str], steps: str, say: Callable[[str], None] = print
  ):
    self._steps, self._say = parse_steps(steps), say
    self._folder = pathlib.Path(workdir) / FOLDER
    self._traced: list[int] = []  # by the trace that is open

  def call(self, step: int, function: Callable[..., T], *args: object) -> T:
    """function(*args), traced if `step` is one of the steps asked for."""
    if step not in self._steps:
      return function(*args)
    if not self._traced:
      jax.profiler.start_trace(self._folder)
    self._traced.append(step)
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      result = function(*args)
    if step == self._steps[-1]:
      jax.block_until_ready(result)  # the device lags behind, and its work belongs in the trace
      self.close()
    return result

  def close(self) -> None:
    """Ends the trace, also of a run that stops before the last of these steps."""
    if self._traced:
      jax.profiler.stop_trace()
      self._say(f"trace of steps {self._traced[0]}-{self._traced[-1]} in {self._folder}")
      self._traced.clear()
