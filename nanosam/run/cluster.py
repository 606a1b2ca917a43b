"""Several processes, one run: who takes part, what they tell each other, and how all of them end.

Besides JAX's connections every process has one to the hub, which runs in process 0. JAX by itself
aborts a process whose peers are missing or die, with a stack trace; the hub knows whom it misses
and tells the others. What processes must agree on, or only one of them knows, goes the same way:
it waits for no device.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src.clusters import ClusterEnv  # the detection of jax.distributed.initialize, which
from jax.experimental import multihost_utils  # does not say what it found before it connects

from nanosam.run.hub import Hub, Line, listen
from nanosam.system.errors import Interrupted, UsageError, UserError, first_line, say
from nanosam.system.signals import StopRequest

T = TypeVar("T")
_GRACE = 3.0  # seconds in which the death of a peer shows here, after it broke a collective


class Place(NamedTuple):
  """What a process must know to join the others."""

  coordinator: str  # host:port of process 0
  processes: int
  process: int
  local_devices: Sequence[int] | None  # None: all that this machine has


class Hosts:
  """The processes of a run, seen from one of them. This one is alone."""

  first = True  # the one that writes what exists once: config, metrics, progress
  broken = False  # this process failed: it waits for no other any more

  def gather(self, value: T) -> list[T]:
    """Every process's value (fit for JSON), in the order of processes, on all of them."""
    return [value]

  def from_first(self, value: T) -> T:
    """The first process's value, on all of them."""
    return self.gather(value)[0]

  def asked_to_stop(self, stop: StopRequest, step: int) -> bool:
    """Whether to stop before another step; called once for each."""
    return bool(stop)

  def report(self, error: BaseException) -> None:
    """Tells the others that this process cannot go on."""


ALONE = Hosts()


class Member(Hosts):
  """One process of several."""

  def __init__(self, place: Place, timeout: float):
    self.first, self._place = place.process == 0, place
    self._line = _connect(place, timeout)
    self._gathered: queue.Queue[list[Any]] = queue.Queue()
    self._over, self._end = threading.Event(), ("", 0)
    self._leaving = False
    host = socket.gethostname()
    self._line.send(hello=place.process, of=place.processes, host=host)
    answer = self._line.receive(timeout + 10)
    if answer is None:
      raise UserError(f"{place.coordinator} is not the coordinator of a run, or died; see there")
    if "end" in answer:
      raise UserError(answer["end"])
    threading.Thread(target=self._listen, name="cluster", daemon=True).start()
    self._line.keep_alive()

  def _listen(self) -> None:
    message: dict[str, Any] | None
    while message := self._line.receive():
      if "gathered" in message:
        self._gathered.put(message["gathered"])
      elif "end" in message:
        break
    if message is None:
      gone = f"lost process 0 ({self._place.coordinator}); run the same command to resume"
      message = {"end": gone, "code": Interrupted.exit_code}
    self._end = message["end"], message["code"]
    self._over.set()
    if self.first and not self._leaving:
      time.sleep(1)  # JAX aborts the others as soon as this process ends: let them speak first
    if not self._leaving:  # else it closes its files by itself
      _exit(*self._end)

  def gather(self, value: T) -> list[T]:
    self._line.send(gather=value)
    return self._gathered.get()  # if a peer dies meanwhile, this process ends

  def asked_to_stop(self, stop: StopRequest, step: int) -> bool:
    return multihost_utils.reached_preemption_sync_point(step)

  def report(self, error: BaseException) -> None:
    if self.broken:
      return
    if not isinstance(error, UserError):
      time.sleep(_GRACE)  # if a peer's death is the reason, this process ends here
      traceback.print_exception(error)
    self.broken = self._leaving = True
    line = first_line(error)
    with contextlib.suppress(OSError):  # a full disk, perhaps, is what failed
      say(line)
    self._line.send(failed=line, code=_code(error))
    self._over.wait(5)  # until the others know

  def leave(self) -> None:
    """The end of a run, at which all arrive."""
    jax.distributed.shutdown()
    self._leaving = True
    self._line.send(left=True)
    self._over.wait(30)


@contextlib.contextmanager
def joined(settings: Any, stop: StopRequest) -> Iterator[Hosts]:
  """The processes of the config's `cluster` section; a failure of one inside ends all."""
  place = find(settings)
  if place is None:
    yield ALONE
    return
  with stop.nothing_to_save():
    member = _join(place, settings.timeout)
    stop.share()
  try:
    yield member
  except Interrupted:  # all of them stop, at the same step
    member.leave()
    raise
  except BaseException as e:
    member.report(e)
    _exit("", _code(e))  # at once: nobody waits for this one
  member.leave()


def find(s: Any) -> Place | None:
  """Where this process belongs: settings, environment, what JAX detects; None if it is alone."""
  given = os.environ.get  # by launch/local.py and the like
  coordinator = s.coordinator or given("NANOSAM_COORDINATOR")
  processes = s.num_processes or int(given("NANOSAM_NUM_PROCESSES", 0)) or None
  process: int | None = s.process_id
  if s.process_id < 0:
    process = int(given("NANOSAM_PROCESS_ID", -1))
    process = None if process < 0 else process
  local_devices = None
  if processes == 1:
    return None
  if None in (coordinator, processes, process):
    try:
      with warnings.catch_warnings(action="ignore"):  # on what is not detected
        coordinator, processes, process, local_devices = (
          ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, processes, process, None, None, s.timeout
          )
        )
    except Exception as e:  # whatever the environment's service answers
      raise UserError(
        f"cannot find out which processes take part ({e}): set cluster.coordinator, "
        "cluster.num_processes and cluster.process_id, or cluster.num_processes=1"
      ) from e
  if processes == 1 or coordinator is processes is process is None:
    return None
  if coordinator is None or processes is None or process is None:
    raise UsageError(
      "several processes need all of cluster.coordinator=HOST:PORT, cluster.num_processes and "
      "cluster.process_id"
    )
  if process >= processes:
    raise UsageError(
      f"cluster.process_id={process} must be below cluster.num_processes={processes}"
    )
  if not coordinator.rpartition(":")[2].isdigit():
    raise UsageError(f"cluster.coordinator={coordinator}: write HOST:PORT of process 0")
  return Place(coordinator, processes, process, local_devices)


def _join(place: Place, timeout: int) -> Member:
  """Calls the roll, then lets JAX connect the processes, all of which are there."""
  hub = None
  if place.process == 0 and (server := listen(place.coordinator)):
    hub = Hub(server, place.processes, timeout)
  member = Member(place, timeout)
  if place.process == 0 and hub is None:
    raise UserError(f"the port of {place.coordinator} is taken on this machine; choose another")
  # On CPUs JAX needs to be told how processes talk; elsewhere this has no effect.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    place.coordinator,
    place.processes,
    place.process,
    place.local_devices,
    cluster_detection_method="deactivate",
    initialization_timeout=timeout,
  )
  # A process whose coordinator dies is aborted by JAX within milliseconds. With sleep(SIGABRT) as
  # the handler of that signal it has six seconds more: enough for `_listen` to say what happened
  # and to end with the code of a run that can be resumed.
  libc = ctypes.CDLL(None)
  libc.signal(signal.SIGABRT, libc.sleep)
  return member


def _connect(place: Place, timeout: float) -> Line:
  host, _, port = place.coordinator.rpartition(":")
  deadline = time.monotonic() + timeout
  while True:
    try:
      return Line(socket.create_connection((host.strip("[]"), int(port)), timeout=10))
    except OSError as e:
      if time.monotonic() > deadline:
        raise UserError(
          f"cannot reach the coordinator {place.coordinator} within {timeout:g} s "
          f"({e.strerror or e}): is process 0 running there, and is the port open?"
        ) from e
    time.sleep(0.5)


def _code(error: BaseException) -> int:
  return error.exit_code if isinstance(error, UserError) else UserError.exit_code


def _exit(text: str, code: int) -> None:
  if text:
    say(text)
  sys.stdout.flush()
  os._exit(code)
