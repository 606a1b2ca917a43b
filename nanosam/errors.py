"""Errors that are the user's to mend, and the one place that prints them."""

import sys
from collections.abc import Callable


class UserError(Exception):
  """A problem a person can act on: shown as one line, never as a traceback."""

  exit_code = 1


class UsageError(UserError):
  """The request itself is wrong: a config, a flag, a path."""

  exit_code = 2


class Interrupted(UserError):
  """Stopped on request after saving; a launcher may start the same command again."""

  exit_code = 75  # EX_TEMPFAIL


def run(main: Callable[[list[str]], None]) -> None:
  """Runs a command line; turns a UserError into one line on stderr and its exit code."""
  try:
    main(sys.argv)
  except UserError as e:
    print(f"nanosam: {e}", file=sys.stderr, flush=True)
    sys.exit(e.exit_code)
