"""Data on remote storage (gs:// and the like): copied to this machine once, then read from there.

Shuffled training touches every part of a store all the time, in pieces of a kilobyte: far too small
to fetch one by one.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from etils import epath

from nanosam.system.errors import UsageError, UserError, first_line, say

_COPIERS = 8
_BLOCK_BYTES = 8 << 20


def is_remote(path: str) -> bool:
  return "://" in path


@contextlib.contextmanager
def reaching(uri: str) -> Iterator[None]:
  """Says in one line why remote storage cannot be read."""
  try:
    yield
  except UserError:
    raise
  except ImportError as e:
    raise UsageError(f"{uri} needs another package: pip install -e '.[gcs]' ({e})") from e
  except Exception as e:  # each storage library has errors of its own
    raise UserError(
      f"cannot read {uri}: {first_line(e)}; check the path and your access to it"
    ) from e


def local_copy(
  remote: epath.Path,
  names: Sequence[str],
  *,
  version: bytes,
  cache_dir: Path,
  check: Callable[[Path], None],
) -> Path:
  """A directory with the named files; `version` tells apart what may lie under one address."""
  key = hashlib.sha256(os.fspath(remote).encode() + b"\n" + version).hexdigest()[:12]
  folder = cache_dir.expanduser() / "copies"
  folder.mkdir(parents=True, exist_ok=True)
  final, partial = folder / key, folder / f".{key}"
  with open(folder / f".{key}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # Another process may be copying: then this one waits.
    if not final.exists():
      partial.mkdir(exist_ok=True)
      _fetch(remote, names, partial, final)
      try:
        check(partial)
      except UserError:
        shutil.rmtree(partial)
        raise
      partial.rename(final)
  return final


def _fetch(remote: epath.Path, names: Sequence[str], partial: Path, final: Path) -> None:
  with concurrent.futures.ThreadPoolExecutor(_COPIERS) as pool:
    sizes = dict(zip(names, pool.map(lambda n: (remote / n).stat().length, names), strict=True))
    missing = [n for n in names if not (partial / n).exists()]
    need = sum(sizes[n] for n in missing)
    if need > shutil.disk_usage(partial).free:
      raise UserError(
        f"{remote} needs {need / 1e9:.1f} GB in {final.parent}, more than is free there; free some "
        "space or set NANOSAM_CACHE to another directory"
      )
    say(f"copying {need / 1e9:.2f} GB from {remote} to {final} (once) ...")
    list(pool.map(lambda n: _fetch_file(remote / n, partial / n, sizes[n]), missing))


def _fetch_file(source: epath.Path, target: Path, size: int) -> None:
  part = target.with_name(f"{target.name}.part")
  with source.open("rb") as f, open(part, "wb") as g:
    shutil.copyfileobj(f, g, _BLOCK_BYTES)
  if part.stat().st_size != size:
    raise UserError(f"the copy of {source} broke off; run the same command to go on")
  part.replace(target)
