"""Errors that the user can fix, and the one place that prints them."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
  """A problem a person can act on: shown as one line, never as a traceback."""

  exit_code = 1


class UsageError(UserError):
  """The request itself is wrong: a config, a flag, a path."""

  exit_code = 2


class Interrupted(UserError):
  """Stopped on request after saving; a launcher may start the same command again."""

  exit_code = 75  # EX_TEMPFAIL


def need(good: object, message: str) -> None:
  """Refuses a request that cannot work."""
  if not good:
    raise UsageError(message)


def first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).split("\n")[0]


def nearest(word: str, words: Iterable[str]) -> str:
  """What a misspelled word may have meant."""
  words = list(words)
  close = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
  return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(words)}"


def say(line: str) -> None:
  """To stderr, marked as ours: launchers look for such lines in logs."""
  print(f"nanosam: {line}", file=sys.stderr, flush=True)


# Troubles with devices, by the words of JAX and of the libraries below it.
_TROUBLES = (
  (
    r"RESOURCE_EXHAUSTED|out of memory",
    "out of memory: try model.remat=True, more grad_accumulation_steps (in configs/single_gpu.py a "
    "smaller micro), a smaller head.chunk or eval_batch_size",
  ),
  (r"cudnn", "cuDNN cannot compute this attention: set model.attention=auto, xla or plain"),
  (
    r"unable to initialize backend|unknown backend|no visible .*devices|libcuda|cuda.*not found",
    "JAX cannot use that device: install '.[cuda]' or '.[tpu]', or set JAX_PLATFORMS=cpu",
  ),
)


def device_trouble(error: BaseException) -> UserError | None:
  """What a person can do about an error of JAX; None if it is something else."""
  text = str(error)
  if isinstance(error, RuntimeError | MemoryError | ValueError | NotImplementedError):
    for words, advice in _TROUBLES:
      if re.search(words, text or type(error).__name__, re.IGNORECASE):
        return UserError(f"{advice} ({first_line(error)[:200]})")
  return UserError(_TROUBLES[0][1]) if isinstance(error, MemoryError) else None


def run(main: Callable[[list[str]], None]) -> None:
  """Runs a command line; turns a UserError into one line on stderr and its exit code."""
  try:
    main(sys.argv)
  except UserError as e:
    say(str(e))
    sys.exit(e.exit_code)
  except KeyboardInterrupt:  # of other commands than training and sweeps, which save first
    say("stopped")
    sys.exit(130)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting would try again
    say("stopped: nothing reads the output any more")
    sys.exit(UserError.exit_code)
  except Exception as e:
    trouble = device_trouble(e)
    if trouble is None:
      raise
    say(str(trouble))
    sys.exit(trouble.exit_code)
