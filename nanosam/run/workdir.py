"""Where a run's files are, and one process's claim on that place. bucket.py has the remote kind."""

import concurrent.futures
import pathlib
import secrets
import tempfile

from etils import epath

from nanosam.run.cluster import Hosts
from nanosam.system.errors import UsageError
from nanosam.system.files import lock_file


class Workdir:
  """A place for a run's files; this one needs no uploads."""

  def __init__(self, files: pathlib.Path, home: epath.Path):
    self.files = files  # config, metrics and everything else that only process 0 writes
    self.home = home  # checkpoints, which all processes write

  def __str__(self) -> str:
    return str(self.home)

  def upload(self) -> concurrent.futures.Future[None] | None:
    """Copies the files to their home in the background; None if they are there already."""
    return None

  def check(self) -> None:
    """Raises if another process has taken the workdir over."""

  def close(self) -> None:
    """Uploads what is left and gives up the claim."""


def open_local(folder: str, hosts: Hosts) -> Workdir:
  path = pathlib.Path(folder)
  if hosts.first:
    create(path)
    claim(path)
  _check_shared(path, hosts)
  return Workdir(path, epath.Path(path))


def _check_shared(path: pathlib.Path, hosts: Hosts) -> None:
  """All processes write to one checkpoint, so they must see the same folder."""
  token = path / f".seen-{hosts.from_first(secrets.token_hex(8))}"
  if hosts.first:
    token.write_text("")
  hosts.gather("written")
  seen = hosts.gather(token.exists())
  if hosts.first:
    token.unlink()
  if blind := [str(i) for i, sees in enumerate(seen) if not sees]:
    raise UsageError(
      f"workdir {path} is not the same folder for all processes (not for {', '.join(blind)}): use "
      "a network file system, or a bucket (gs://...)"
    )


def create(folder: pathlib.Path) -> None:
  """Makes sure that the folder exists and can be written to, before anything expensive."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as e:
    raise UsageError(f"cannot write to workdir {folder}: {e.strerror or e}") from e


def claim(folder: pathlib.Path) -> None:
  """Locks the folder until this process ends: two runs in one place would ruin each other."""
  try:
    lock_file(folder / ".lock")  # released when the process ends
  except BlockingIOError:
    raise UsageError(
      f"another process is training in {folder}: wait for it, end it, or use another workdir"
    ) from None
