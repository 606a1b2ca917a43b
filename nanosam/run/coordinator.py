"""Process 0's server for all processes of a run: gathers their values, notices who is gone."""

import collections
import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Any

from nanosam.system.errors import Interrupted, UserError

PING, SILENCE = 10.0, 45.0  # seconds between signs of life, and without any


class Connection:
  """Carries JSON objects."""

  def __init__(self, stream: socket.socket):
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._socket, self._file = stream, stream.makefile("rb")
    self._lock = threading.Lock()

  def send(self, **message: Any) -> None:
    """Never fails: that a peer is gone is noticed when receiving from it."""
    with self._lock, contextlib.suppress(OSError):
      self._socket.sendall(json.dumps(message).encode() + b"\n")

  def receive(self, timeout: float = SILENCE) -> dict[str, Any] | None:
    """The next message; None if the peer is gone or has been silent for too long."""
    self._socket.settimeout(timeout)
    try:
      message = json.loads(self._file.readline())
      return message if isinstance(message, dict) else None
    except (OSError, ValueError):
      return None

  def keep_alive(self) -> None:
    """From now on tells the peer regularly that this process is alive."""

    def ping() -> None:
      while True:
        time.sleep(PING)
        self.send(ping=True)

    threading.Thread(target=ping, name="keep-alive", daemon=True).start()


def listen(address: str) -> socket.socket | None:
  """A server on the port of `address`, on all interfaces; None if the port is taken."""
  port = int(address.rpartition(":")[2])
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  try:
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
  except OSError as e:
    if e.errno == errno.EADDRINUSE:
      return None
    raise UserError(f"cannot listen on port {port}: {e.strerror}; choose another") from e


class Coordinator:
  """Runs in threads of its own; process 0 connects to it like any other process."""

  def __init__(self, server: socket.socket, processes: int, timeout: float):
    self._processes, self._timeout = processes, timeout
    self._connections: dict[int, Connection] = {}
    self._hosts: dict[int, str] = {}
    self._values: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)
    self._left: set[int] = set()
    self._over = False
    self._lock = threading.RLock()
    threading.Thread(target=self._run, args=(server,), name="coordinator", daemon=True).start()

  def _run(self, server: socket.socket) -> None:
    with server:  # closed once all have joined: JAX listens on this port next
      complete = self._accept_all(server)
    if complete:
      self._broadcast(start=True)
      for process, connection in self._connections.items():
        connection.keep_alive()
        threading.Thread(target=self._serve, args=(process, connection), daemon=True).start()

  def _accept_all(self, server: socket.socket) -> bool:
    deadline = time.monotonic() + self._timeout
    while len(self._connections) < self._processes:
      server.settimeout(max(deadline - time.monotonic(), 0.01))
      try:
        connection = Connection(server.accept()[0])
      except TimeoutError:
        self._end(self._missing())
        return False
      hello = connection.receive(timeout=10)
      if hello is None or "hello" not in hello:
        continue  # some other program
      if problem := self._problem(hello):
        connection.send(end=problem, code=UserError.exit_code)
        self._end(problem)
        return False
      self._connections[hello["hello"]], self._hosts[hello["hello"]] = connection, hello["host"]
    return True

  def _problem(self, hello: dict[str, Any]) -> str:
    process, host = hello["hello"], hello["host"]
    if hello["of"] != self._processes:
      return (
        f"process {process} on {host} expects {hello['of']} processes, process 0 expects "
        f"{self._processes}: give all the same cluster.num_processes"
      )
    if process in self._connections:
      return (
        f"two processes have the id {process}, on {self._hosts[process]} and on {host}: give each "
        "its own cluster.process_id"
      )
    return ""

  def _missing(self) -> str:
    names = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")  # in the order of processes
    known = names if len(names) == self._processes else []
    missing = [
      f"process {i}" + (f" ({known[i]})" if known else "")
      for i in range(self._processes)
      if i not in self._connections
    ]
    here = ", ".join(f"{i} on {self._hosts[i]}" for i in sorted(self._connections))
    return (
      f"after {self._timeout:g} s {', '.join(missing)} of {self._processes} did not join (joined: "
      f"{here}): start them, or raise cluster.timeout"
    )

  def _serve(self, process: int, connection: Connection) -> None:
    who = f"process {process} on {self._hosts[process]}"
    while message := connection.receive():
      with self._lock:
        if "gather" in message:
          self._values[process].append(message["gather"])
          if all(self._values[i] for i in range(self._processes)):
            self._broadcast(gathered=[self._values[i].popleft() for i in range(self._processes)])
        elif "failed" in message:
          return self._end(f"{who} failed: {message['failed']}", message["code"])
        elif "left" in message:
          self._left.add(process)
          return self._end("") if len(self._left) == self._processes else None
    self._end(f"{who} is gone; run the same command to resume", Interrupted.exit_code)

  def _end(self, text: str, code: int = UserError.exit_code) -> None:
    """Only the first reason counts: the others follow from it."""
    with self._lock:
      if not self._over:
        self._over = True
        self._broadcast(end=text, code=code)

  def _broadcast(self, **message: Any) -> None:
    for process in sorted(self._connections, reverse=True):  # process 0 last: it may end at once
      self._connections[process].send(**message)
