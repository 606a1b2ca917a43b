"""Several processes, one run: who takes part, what they exchange, and how all of them end.

Besides JAX's connections every process has one to our coordinator, which runs in process 0. JAX
aborts a process whose peers are missing or die, with a stack trace; the coordinator knows who is
missing and tells the others. Values that processes must agree on, or that only one of them has, go
the same way: it waits for no device.
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

from nanosam.run.coordinator import Connection, Coordinator, listen
from nanosam.system.errors import Interrupted, UsageError, UserError, first_line, say
from nanosam.system.signals import StopRequest

T = TypeVar("T")
_GRACE = 3.0  # seconds within which a peer's death is known here, after it broke a collective


class Place(NamedTuple):
  """What a process must know to join the others."""

  coordinator: str  # host:port of process 0
  processes: int
  process: int
  local_devices: Sequence[int] | None  # None: all that this machine has


class Hosts:
  """The processes of a run, seen from one of them. In this class it is the only one."""

  first = True  # it writes what exists once: config, metrics, progress
  broken = False  # this process failed: it no longer waits for others

  def gather(self, value: T) -> list[T]:
    """The values of all processes (fit for JSON), in process order, on all of them."""
    return [value]

  def from_first(self, value: T) -> T:
    """The first process's value, on all of them."""
    return self.gather(value)[0]

  def asked_to_stop(self, stop: StopRequest, step: int) -> bool:
    """Whether to stop before the next step; called once per step."""
    return bool(stop)

  def report(self, error: BaseException) -> None:
    """Tells the others that this process failed."""


ALONE = Hosts()


class Member(Hosts):
  """One process of several."""

  def __init__(self, place: Place, timeout: float):
    self.first, self._place = place.process == 0, place
    self._connection = _connect(place, timeout)
    self._gathered: queue.Queue[list[Any]] = queue.Queue()
    self._over, self._leaving = threading.Event(), False
    host = socket.gethostname()
    self._connection.send(hello=place.process, of=place.processes, host=host)
    answer = self._connection.receive(timeout + 10)
    if answer is None:
      raise UserError(f"{place.coordinator} is not the coordinator of a run, or died; see there")
    if "end" in answer:
      raise UserError(answer["end"])
    threading.Thread(target=self._listen, name="cluster", daemon=True).start()
    self._connection.keep_alive()

  def _listen(self) -> None:
    message: dict[str, Any] | None
    while message := self._connection.receive():
      if "gathered" in message:
        self._gathered.put(message["gathered"])
      elif "end" in message:
        break
    if message is None:
      gone = f"lost process 0 ({self._place.coordinator}); run the same command to resume"
      message = {"end": gone, "code": Interrupted.exit_code}
    self._over.set()
    if self.first and not self._leaving:
      time.sleep(1)  # JAX aborts the others as soon as this process ends: let them report first
    if not self._leaving:  # otherwise the main thread closes its files and ends
      _exit(message["end"], message["code"])

  def gather(self, value: T) -> list[T]:
    self._connection.send(gather=value)
    return self._gathered.get()  # if a peer dies meanwhile, `_listen` ends this process

  def asked_to_stop(self, stop: StopRequest, step: int) -> bool:
    return multihost_utils.reached_preemption_sync_point(step)

  def report(self, error: BaseException) -> None:
    if self.broken:
      return
    if not isinstance(error, UserError):
      time.sleep(_GRACE)  # if a peer's death is the reason, `_listen` ends this process here
      traceback.print_exception(error)
    self.broken = self._leaving = True
    line = first_line(error)
    with contextlib.suppress(OSError):  # what failed may be a full disk
      say(line)
    self._connection.send(failed=line, code=_code(error))
    self._over.wait(5)  # until the others know

  def leave(self) -> None:
    """Ends the run; all processes call it."""
    jax.distributed.shutdown()
    self._leaving = True
    self._connection.send(left=True)
    self._over.wait(30)


@contextlib.contextmanager
def joined(settings: Any, stop: StopRequest) -> Iterator[Hosts]:
  """The processes of the config's `cluster` section; if one fails inside, all end."""
  place = find(settings)
  if place is None:
    yield ALONE
    return
  with stop.nothing_to_save():
    member = _join(place, settings.timeout)
    stop.share()
  try:
    yield member
  except Interrupted:  # all of them stop at the same step
    member.leave()
    raise
  except BaseException as e:
    member.report(e)
    _exit("", _code(e))  # at once: nobody waits for this process
  member.leave()


def find(s: Any) -> Place | None:
  """This process's place by settings, environment or JAX's detection; None if it is alone."""
  given = os.environ.get  # by launch/local.py and the like
  coordinator = s.coordinator or given("NANOSAM_COORDINATOR")
  processes = s.num_processes or int(given("NANOSAM_NUM_PROCESSES", 0)) or None
  number = s.process_id if s.process_id >= 0 else int(given("NANOSAM_PROCESS_ID", -1))
  process, local_devices = number if number >= 0 else None, None
  if processes == 1:
    return None
  if None in (coordinator, processes, process):
    try:
      with warnings.catch_warnings(action="ignore"):  # about what it does not detect
        coordinator, processes, process, local_devices = (
          ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, processes, process, None, None, s.timeout
          )
        )
    except Exception as e:  # depends on the environment's services
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
  """Waits for all processes, then lets JAX connect them."""
  server = listen(place.coordinator) if place.process == 0 else None
  if server:
    Coordinator(server, place.processes, timeout)
  member = Member(place, timeout)
  if place.process == 0 and server is None:
    raise UserError(f"the port of {place.coordinator} is taken on this machine; choose another")
  # On CPUs JAX must be told how processes communicate; elsewhere this has no effect.
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
  # the handler of that signal it has six more seconds: enough for `_listen` to say what happened
  # and to end with the exit code of a run that can be resumed.
  libc = ctypes.CDLL(None)
  libc.signal(signal.SIGABRT, libc.sleep)
  return member


def _connect(place: Place, timeout: float) -> Connection:
  host, _, port = place.coordinator.rpartition(":")
  deadline = time.monotonic() + timeout
  while True:
    try:
      return Connection(socket.create_connection((host.strip("[]"), int(port)), timeout=10))
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
