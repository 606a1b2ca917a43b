"""Trains a model of text or images.

python -m nanosam.train --config=configs/FILE.py[:k=v,...] [--config.KEY=VALUE ...] [--dry_run]

--dry_run checks the config and the data like a run, and says what the run would be and cost.
"""

import contextlib

from nanosam import config as config_lib
from nanosam.curvature.diagnostics import Diagnostics
from nanosam.run import dry_run, usage
from nanosam.run.cluster import joined
from nanosam.run.trainer import open_trainer
from nanosam.run.validate import validate
from nanosam.run.workdir import open_workdir
from nanosam.system import errors
from nanosam.system.signals import StopRequest

DRY_RUN = "--dry_run"


def main(argv: list[str]) -> None:
  if {"-h", "--help"} & {*argv[1:]}:
    return print(f"{__doc__}\n{usage.text()}")
  c = config_lib.from_command_line([word for word in argv if word != DRY_RUN])
  if DRY_RUN in argv:
    return print(dry_run.describe(dry_run.facts(c)))
  validate(c)
  with StopRequest() as stop, joined(c.cluster, stop) as hosts:
    with stop.nothing_to_save():
      workdir = open_workdir(c.workdir, c.data.cache_dir, hosts)
    with contextlib.closing(workdir):
      with stop.nothing_to_save():
        trainer = open_trainer(c, workdir, stop, hosts, make_diagnostics=Diagnostics)
      if trainer:
        trainer.run()


if __name__ == "__main__":
  errors.run(main)
