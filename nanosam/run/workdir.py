"""Where a run's files are, a folder or a bucket, and one process's claim on that place."""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import secrets
import shutil
import socket
import tempfile
import threading
import time

from etils import epath

from nanosam.data.sources import default_cache_dir
from nanosam.run.cluster import Hosts
from nanosam.run.metrics_file import METRICS_FILE
from nanosam.system.errors import UsageError, UserError, say
from nanosam.system.files import lock_file
from nanosam.system.remote import is_remote, storage_errors

LEASE, OWNER = ".lease", ".owner"
UPLOAD_EVERY = 60.0  # seconds
RENEW_EVERY, TAKE_OVER_AFTER = 10.0, 45.0  # seconds
_IN_SUBFOLDERS = ("wandb/next_row",)  # downloaded at a start, besides the files at the top


def open_workdir(path: str, cache_dir: str, hosts: Hosts) -> "Workdir":
  """A folder, or gs://... with its mirror in `cache_dir`."""
  if is_remote(path):
    return RemoteWorkdir(path, cache_dir, hosts)
  folder = pathlib.Path(path)
  if hosts.first:
    claim(folder)
  _check_shared(folder, hosts)
  return Workdir(folder, epath.Path(folder))


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


def claim(folder: pathlib.Path) -> None:
  """Creates the folder and locks it until this process ends, before anything expensive.

  Two runs in one place would ruin each other.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    lock_file(folder / ".lock")  # released when the process ends
  except BlockingIOError:
    raise UsageError(
      f"another process is training in {folder}: wait for it, end it, or use another workdir"
    ) from None
  except OSError as e:
    raise UsageError(f"cannot write to workdir {folder}: {e.strerror or e}") from e


class Folder:
  """The objects below gs://BUCKET/PATH."""

  def __init__(self, uri: str):
    scheme, _, path = uri.partition("://")
    bucket, _, prefix = path.strip("/").partition("/")
    if scheme != "gs" or not prefix:
      raise UsageError(f"workdir {uri}: a remote workdir is gs://BUCKET/PATH")
    self.uri, self._prefix = uri, prefix
    with storage_errors(uri):
      from google.cloud import storage

      self._bucket = storage.Client().bucket(bucket)

  def write(self, name: str, content: bytes, **precondition: int) -> int:
    """Returns the object's new generation."""
    blob = self._bucket.blob(f"{self._prefix}/{name}")
    blob.upload_from_string(content, "application/octet-stream", **precondition)
    return blob.generation

  def read(self, name: str) -> tuple[int, bytes]:
    """Generation and content; (0, b"") if there is no such object."""
    blob = self._bucket.get_blob(f"{self._prefix}/{name}")
    if blob is None:
      return 0, b""
    return blob.generation, blob.download_as_bytes()

  def delete(self, name: str, **precondition: int) -> None:
    self._bucket.blob(f"{self._prefix}/{name}").delete(**precondition)

  def files(self) -> list[str]:
    """Names of the objects at the top level."""
    found = self._bucket.list_blobs(prefix=f"{self._prefix}/", delimiter="/")
    names = (blob.name.removeprefix(f"{self._prefix}/") for blob in found)
    return [name for name in names if name]


class Lease:
  """Reserves a remote workdir for this process; renewed for as long as the process lives.

  Whoever finds a lease watches it for a while. If it is renewed, its run is alive; if not, its
  process died. The clocks of two machines are never compared.
  """

  def __init__(self, folder: Folder, owner: pathlib.Path):
    self._folder = folder
    before = owner.read_text() if owner.exists() else ""
    self._token = secrets.token_hex(8)
    owner.write_text(self._token)
    self._generation = self._replaceable(before)
    self._released = threading.Event()
    self.lost = False
    if not self._write():
      raise self._taken()
    self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
    self._renewal.start()

  def _replaceable(self, before: str) -> int:
    """The generation of no lease or of a dead one; `before` is the last token of this machine."""
    generation, owner = self._read()
    if not generation or owner["token"] == before:
      return generation
    say(
      f"{self._folder.uri} was last used on {owner['host']}; waiting {TAKE_OVER_AFTER:g} s to see "
      "whether that run is alive ..."
    )
    deadline = time.monotonic() + TAKE_OVER_AFTER
    while time.monotonic() < deadline:
      time.sleep(TAKE_OVER_AFTER / 20)
      now, _ = self._read()
      if now == 0:
        return 0
      if now != generation:
        raise self._taken()
    return generation

  def _read(self) -> tuple[int, dict[str, str]]:
    generation, content = self._folder.read(LEASE)
    return generation, json.loads(content or b"{}")

  def _write(self) -> bool:
    """False if another process holds the lease by now."""
    from google.api_core.exceptions import PreconditionFailed

    content = json.dumps({"token": self._token, "host": socket.gethostname()}).encode()
    try:
      self._generation = self._folder.write(LEASE, content, if_generation_match=self._generation)
    except PreconditionFailed:
      generation, owner = self._read()
      if owner.get("token") != self._token:
        return False
      self._generation = generation  # our own write: the client lost the answer and repeated it
    return True

  def _taken(self) -> UsageError:
    host = self._read()[1].get("host", "another machine")
    return UsageError(
      f"another process is training in {self._folder.uri}, on {host}: wait for it, end it, or use "
      "another workdir"
    )

  def _renew(self) -> None:
    while not self.lost and not self._released.wait(RENEW_EVERY):
      with contextlib.suppress(Exception):  # out of reach for now: try again next time
        self.lost = not self._write()

  def check(self) -> None:
    if self.lost:
      raise UserError(
        f"another process took {self._folder.uri} over while this one could not reach it: this one "
        "stops, the other continues"
      )

  def release(self) -> None:
    self._released.set()
    self._renewal.join()
    with contextlib.suppress(Exception):
      self._folder.delete(LEASE, if_generation_match=self._generation)


class RemoteWorkdir(Workdir):
  """A workdir in a bucket: a local mirror that is uploaded as it grows, and a lease on the bucket.

  Objects cannot be appended to. So process 0 writes its files to the mirror, and a thread uploads
  whole files that changed: every minute, before a checkpoint counts as complete, and at the end.
  Checkpoints do not go through the mirror: every process writes its part to the bucket.

  The bucket holds the truth. A start empties the mirror and downloads it again, on whatever
  machine. What a dead process had not uploaded is lost, but it is newer than the last checkpoint.
  """

  def __init__(self, uri: str, cache_dir: str, hosts: Hosts):
    self._folder = Folder(uri)
    cache = pathlib.Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    place = cache / "workdirs" / hashlib.sha256(uri.encode()).hexdigest()[:12]
    super().__init__(place / uri.rstrip("/").rpartition("/")[2], epath.Path(uri))
    self._lease: Lease | None = None  # of the process that writes the files
    self._uploader = concurrent.futures.ThreadPoolExecutor(1, "uploads")
    self._uploaded: dict[str, tuple[int, int]] = {}
    if hosts.first:
      claim(place)
      with storage_errors(uri):
        self._lease = Lease(self._folder, place / OWNER)
        self._download()
      threading.Thread(target=self._upload_regularly, name="upload-timer", daemon=True).start()

  def _download(self) -> None:
    shutil.rmtree(self.files, ignore_errors=True)
    for name in (*self._folder.files(), *_IN_SUBFOLDERS):
      generation, content = self._folder.read(name)
      if generation and name != LEASE:
        (self.files / name).parent.mkdir(parents=True, exist_ok=True)
        (self.files / name).write_bytes(content)
    self.files.mkdir(parents=True, exist_ok=True)

  def upload(self) -> concurrent.futures.Future[None]:
    return self._uploader.submit(self._upload_changes)

  def _upload_regularly(self) -> None:
    while True:
      time.sleep(UPLOAD_EVERY)
      with contextlib.suppress(Exception):  # uploaded next time, at the latest by close()
        self.upload().result()

  def _upload_changes(self) -> None:
    if self._lease is None:
      return
    # Metrics are read first and uploaded last: what they refer to is in the bucket before them.
    metrics = self._changed(self.files / METRICS_FILE)
    for path in sorted(self.files.rglob("*")):
      if path.is_file() and not path.is_symlink() and path.name != METRICS_FILE:
        self._upload_file(path, self._changed(path))
    self._upload_file(self.files / METRICS_FILE, metrics)

  def _changed(self, path: pathlib.Path) -> tuple[tuple[int, int], bytes] | None:
    """A stamp and the content; None if it is as uploaded, or gone."""
    try:
      stat = path.stat()
      stamp = stat.st_size, stat.st_mtime_ns
      return (stamp, path.read_bytes()) if self._uploaded.get(str(path)) != stamp else None
    except FileNotFoundError:
      return None

  def _upload_file(self, path: pathlib.Path, changed: tuple[tuple[int, int], bytes] | None) -> None:
    if changed:
      self.check()
      stamp, content = changed
      self._folder.write(path.relative_to(self.files).as_posix(), content)
      self._uploaded[str(path)] = stamp

  def check(self) -> None:
    if self._lease:
      self._lease.check()

  def close(self) -> None:
    try:
      self.upload().result()
    except UserError:
      raise
    except Exception as e:
      raise UserError(
        f"cannot upload {self.files} to {self._folder.uri}: {e}; run the same command again"
      ) from e
    if self._lease:
      self._lease.release()
