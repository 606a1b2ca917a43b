"""Child processes that must not outlive their parent."""

import multiprocessing
import os
import signal
import threading
import time


def exit_with_parent(parent: int | None = None, *, grace: float = 0.0) -> None:
  """Leaves ctrl-C to the parent; ends this process once that has died, `grace` seconds later.

  A multiprocessing worker knows its parent; any other process must be told the id.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  starter = multiprocessing.parent_process()

  def watch() -> None:
    while starter.is_alive() if starter else os.getppid() == parent:
      time.sleep(0.5)
    time.sleep(grace)
    os._exit(1)

  threading.Thread(target=watch, name="parent-watch", daemon=True).start()
