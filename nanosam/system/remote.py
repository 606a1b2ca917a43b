"""Data on remote storage (gs:// and the like): copied to this machine once, then read locally.

Shuffled training reads a kilobyte here and a kilobyte there, which is far too little per request.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from etils import epath

from nanosam.system.errors import UsageError, UserError, first_line, say
from nanosam.system.files import PARTIAL, lock_file

_THREADS = 8
_BLOCK_BYTES = 8 << 20


def is_remote(path: str) -> bool:
  return "://" in path


@contextlib.contextmanager
def storage_errors(uri: str) -> Iterator[None]:
  """Turns whatever a storage library raises into one line."""
  try:
    yield
  except UserError:
    raise
  except ImportError as e:
    raise UsageError(f"{uri} needs another package: pip install -e '.[gcs]' ({e})") from e
  except Exception as e:  # each storage library has errors of its own
    message = re.search(r'"message": *"([^"]+)"', str(e))  # the store's, among request details
    reason = message[1] if message else first_line(e)
    raise UserError(f"cannot use {uri}: {reason}; check the path and your access to it") from e


def local_copy(
  remote: epath.Path,
  names: Sequence[str],
  *,
  version: bytes,
  cache_dir: Path,
  check: Callable[[Path], None],
) -> Path:
  """A local directory with the named files.

  `version` distinguishes data that were at the same address at different times. `check` raises a
  UserError if the copy is damaged.
  """
  key = hashlib.sha256(os.fspath(remote).encode() + b"\n" + version).hexdigest()[:12]
  folder = cache_dir.expanduser() / "copies"
  folder.mkdir(parents=True, exist_ok=True)
  final, partial = folder / key, folder / f".{key}"
  lock = lock_file(folder / f".{key}.lock", wait=True)  # another process may be copying
  try:
    if not final.exists():
      partial.mkdir(exist_ok=True)
      _fetch(remote, names, partial, final)
      try:
        check(partial)
      except UserError:
        shutil.rmtree(partial)
        raise
      partial.rename(final)
  finally:
    os.close(lock)
  return final


def _fetch(remote: epath.Path, names: Sequence[str], partial: Path, final: Path) -> None:
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    sizes = dict(zip(names, pool.map(lambda n: (remote / n).stat().length, names), strict=True))
    missing = [n for n in names if not (partial / n).exists()]
    need = sum(sizes[n] for n in missing)
    if need > shutil.disk_usage(partial).free:
      raise UserError(
        f"{remote} needs {need / 1e9:.1f} GB in {final.parent}, more than is free; free some space "
        "or set NANOSAM_CACHE to another directory"
      )
    say(f"copying {need / 1e9:.2f} GB from {remote} to {final} (once) ...")
    list(pool.map(lambda n: _fetch_file(remote / n, partial / n, sizes[n]), missing))


def _fetch_file(source: epath.Path, target: Path, size: int) -> None:
  partial = target.with_name(target.name + PARTIAL)
  with source.open("rb") as f, open(partial, "wb") as g:
    shutil.copyfileobj(f, g, _BLOCK_BYTES)
  if partial.stat().st_size != size:
    raise UserError(f"the copy of {source} was cut short; run the same command to resume")
  partial.replace(target)
