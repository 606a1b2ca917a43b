"""Command lines whose mistakes end as one line."""

import argparse
from typing import Any

from nanosam.errors import UsageError


class Parser(argparse.ArgumentParser):
  def __init__(self, module: str, description: str):
    super().__init__(f"python -m {module}", description=description, allow_abbrev=False)

  def error(self, message: str) -> Any:
    raise UsageError(f"{message}; see --help")
