"""Command lines whose mistakes end as one line."""

import argparse
from typing import NoReturn

from nanosam.errors import UsageError


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
    raise UsageError(f"{message}; {self.prog} --help shows what there is")
