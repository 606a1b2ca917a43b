"""A workdir in a bucket: a mirror on this machine, sent there as it grows, and a claim on it.

An object cannot be appended to. So the first process writes its files to the mirror, and a thread
sends whole those that changed: every minute, before a checkpoint counts as complete, and at the
end. Checkpoints do not pass through the mirror: every process writes its part to the bucket.

What lies in the bucket is the run. A start empties the mirror and fetches it anew, so it does not
matter on which machine that is, nor what a process that died had not sent: all of that is younger
than the last checkpoint.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator

from etils import epath

from nanosam.data.sources import default_cache_dir
from nanosam.run.cluster import Hosts
from nanosam.run.metrics_file import METRICS_FILE
from nanosam.run.workdir import Workdir, claim, create
from nanosam.system.errors import UsageError, UserError, say

LEASE, OWNER = ".lease", ".owner"
UPLOAD_EVERY = 60.0  # seconds
RENEW_EVERY, TAKE_OVER_AFTER = 10.0, 45.0  # seconds
_OF_EARLIER_STARTS = ("wandb/next_row",)  # needed by later ones, besides what lies at the top


class Folder:
  """The objects below gs://BUCKET/PATH."""

  def __init__(self, uri: str):
    scheme, _, path = uri.partition("://")
    bucket, _, prefix = path.strip("/").partition("/")
    if scheme != "gs" or not prefix:
      raise UsageError(f"workdir {uri}: a remote one is gs://BUCKET/PATH")
    self.uri, self._prefix = uri, prefix
    with self.trouble():
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
    """Names of the objects at the top."""
    found = self._bucket.list_blobs(prefix=f"{self._prefix}/", delimiter="/")
    names = (blob.name.removeprefix(f"{self._prefix}/") for blob in found)
    return [name for name in names if name]

  @contextlib.contextmanager
  def trouble(self) -> Iterator[None]:
    """Says in one line why the bucket cannot be used."""
    try:
      yield
    except UserError:
      raise
    except ImportError as e:
      raise UsageError(f"{self.uri} needs another package: pip install -e '.[gcs]'") from e
    except Exception as e:  # of the client, of its transport, of the credentials
      text = str(e).strip() or type(e).__name__
      told = re.search(r'"message": *"([^"]+)"', text)  # by the store, amid the request's details
      line = told[1] if told else text.split("\n")[0]
      raise UserError(
        f"cannot use {self.uri}: {line}; check that the bucket exists and that you may write to it"
      ) from e


class Lease:
  """Keeps a remote workdir for one process, and renews its claim as long as that lives.

  Whoever finds a claim watches it for a while. One that is renewed belongs to a run under way; one
  that is not was left by a process that died. No clock is compared with that of another machine.
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
    """The generation of no claim, or of a dead one; `before` is the last one of this machine."""
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
    """False if the claim is another's by now."""
    from google.api_core.exceptions import PreconditionFailed

    content = json.dumps({"token": self._token, "host": socket.gethostname()}).encode()
    try:
      self._generation = self._folder.write(LEASE, content, if_generation_match=self._generation)
    except PreconditionFailed:
      generation, owner = self._read()
      if owner.get("token") != self._token:
        return False
      self._generation = generation  # of our own write: its answer was lost, and it was repeated
    return True

  def _taken(self) -> UsageError:
    host = self._read()[1].get("host", "another machine")
    return UsageError(
      f"another process is training in {self._folder.uri}, on {host}: wait for it, end it, or use "
      "another workdir"
    )

  def _renew(self) -> None:
    while not self.lost and not self._released.wait(RENEW_EVERY):
      with contextlib.suppress(Exception):  # out of reach for now: the next time, then
        self.lost = not self._write()

  def check(self) -> None:
    if self.lost:
      raise UserError(
        f"another process took {self._folder.uri} over while this one could not reach it; this one "
        "ends, that one goes on"
      )

  def release(self) -> None:
    self._released.set()
    self._renewal.join()
    with contextlib.suppress(Exception):
      self._folder.delete(LEASE, if_generation_match=self._generation)


class RemoteWorkdir(Workdir):
  """Has a mirror in the first process only; the others write nothing but checkpoints."""

  def __init__(self, uri: str, cache_dir: str, hosts: Hosts):
    self._folder = Folder(uri)
    cache = pathlib.Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    place = cache / "workdirs" / hashlib.sha256(uri.encode()).hexdigest()[:12]
    super().__init__(place / uri.rstrip("/").rpartition("/")[2], epath.Path(uri))
    self._lease: Lease | None = None
    if hosts.first:
      create(place)
      claim(place)
      with self._folder.trouble():
        self._lease = Lease(self._folder, place / OWNER)
        self._fetch()
      self._sender = concurrent.futures.ThreadPoolExecutor(1, "uploads")
      self._sent: dict[str, tuple[int, int]] = {}
      threading.Thread(target=self._upload_regularly, name="upload-timer", daemon=True).start()

  def _fetch(self) -> None:
    shutil.rmtree(self.files, ignore_errors=True)
    for name in (*self._folder.files(), *_OF_EARLIER_STARTS):
      generation, content = self._folder.read(name)
      if generation and name != LEASE:
        (self.files / name).parent.mkdir(parents=True, exist_ok=True)
        (self.files / name).write_bytes(content)
    self.files.mkdir(parents=True, exist_ok=True)

  def upload(self) -> concurrent.futures.Future[None] | None:
    if self._lease:
      return self._sender.submit(self._send_changes)
    nothing: concurrent.futures.Future[None] = concurrent.futures.Future()
    nothing.set_result(None)
    return nothing

  def _upload_regularly(self) -> None:
    while True:
      time.sleep(UPLOAD_EVERY)
      with contextlib.suppress(Exception):  # what failed is sent the next time; at last by close()
        self._sender.submit(self._send_changes).result()

  def _send_changes(self) -> None:
    # The metrics are read first and sent last: what they speak of is in the bucket before them.
    metrics = self._changed(self.files / METRICS_FILE)
    for path in sorted(self.files.rglob("*")):
      if path.is_file() and not path.is_symlink() and path.name != METRICS_FILE:
        self._send(path, self._changed(path))
    self._send(self.files / METRICS_FILE, metrics)

  def _changed(self, path: pathlib.Path) -> tuple[tuple[int, int], bytes] | None:
    """A stamp and the content; None if it is as sent, or gone."""
    try:
      stat = path.stat()
      stamp = stat.st_size, stat.st_mtime_ns
      return (stamp, path.read_bytes()) if self._sent.get(str(path)) != stamp else None
    except FileNotFoundError:
      return None

  def _send(self, path: pathlib.Path, changed: tuple[tuple[int, int], bytes] | None) -> None:
    if changed:
      self.check()
      stamp, content = changed
      self._folder.write(path.relative_to(self.files).as_posix(), content)
      self._sent[str(path)] = stamp

  def check(self) -> None:
    if self._lease:
      self._lease.check()

  def close(self) -> None:
    if not self._lease:
      return
    try:
      self._sender.submit(self._send_changes).result()
    except UserError:
      raise
    except Exception as e:
      raise UserError(
        f"cannot send {self.files} to {self._folder.uri}: {e}; run the same command again"
      ) from e
    self._lease.release()
