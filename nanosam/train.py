"""Trains a model of text or images.

python -m nanosam.train --config=configs/FILE.py[:k=v,...] [--config.KEY=VALUE ...] [--dry_run]

--dry_run checks the config and the data like a run, and says what the run would be and cost.
"""

from nanosam import config as config_lib
from nanosam.curvature.diagnostics import Diagnostics
from nanosam.run import dry_run, usage
from nanosam.run.trainer import train
from nanosam.system import errors

DRY_RUN = "--dry_run"


def main(argv: list[str]) -> None:
  if {"-h", "--help"} & {*argv[1:]}:
    return print(f"{__doc__}\n{usage.text()}")
  c = config_lib.from_command_line([word for word in argv if word != DRY_RUN])
  if DRY_RUN in argv:
    return print(dry_run.describe(dry_run.facts(c)))
  train(c, make_diagnostics=Diagnostics)


if __name__ == "__main__":
  errors.run(main)
