"""Command lines, on which a mistake ends in one line."""

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from nanosam.system.errors import UsageError, nearest
from nanosam.system.files import disk_errors
from nanosam.system.remote import is_remote

T = TypeVar("T", bound=Any)


class Parser(argparse.ArgumentParser):
  """`command` is what a person types: "python -m nanosam.plots"; no flag can be abbreviated."""

  def __init__(self, command: str, description: str | None):
    super().__init__(
      command,
      description=description,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )

  def error(self, message: str) -> NoReturn:
    raise UsageError(f"{message}; {self.prog} --help lists the options")


class RunParser(Parser):
  """For commands that work on a run."""

  def __init__(self, command: str, description: str | None):
    super().__init__(f"python -m nanosam.{command}", description)
    self.add_argument("--workdir", required=True, help="workdir of the run")
    add_model_arguments(self)


def add_model_arguments(p: Parser) -> None:
  """Which model of a run."""
  p.add_argument("--step", default="latest", help="latest (default), best, or a number")
  p.add_argument(
    "--weights", choices=("raw", "average"), default="raw", help="see opt.average (default raw)"
  )


def results_folder(args: argparse.Namespace) -> pathlib.Path:
  """Where a command that works on a run writes its files; checked before it measures."""
  if is_remote(args.workdir) and not args.out:
    raise UsageError(f"{args.workdir} is remote: say where to write the results, --out=DIR")
  out = pathlib.Path(args.out or args.workdir)
  with disk_errors(out):
    if args.out:
      out.mkdir(parents=True, exist_ok=True)
    if out.is_dir():  # otherwise there is no such run, as loading it will say
      tempfile.TemporaryFile(dir=out).close()
  return out


def with_pairs(settings: T, pairs: Sequence[str]) -> T:
  """A dataclass of numbers, with NAME=VALUE pairs of a command line (--set)."""
  for pair in pairs:
    name, _, value = pair.partition("=")
    fields = dataclasses.asdict(settings)
    if name not in fields:
      raise UsageError(f"--set={pair}: {nearest(name, fields)}")
    try:
      settings = dataclasses.replace(settings, **{name: type(fields[name])(value)})
    except ValueError as e:
      raise UsageError(f"--set={pair}: {name} is a number, like {fields[name]}") from e
  return settings


def numbers(text: str) -> tuple[float, ...]:
  """A comma-separated argument."""
  return tuple(float(x) for x in text.split(","))
