"""Pretrains a language model.

python -m nanosam.train --config=configs/FILE.py[:k=v,...] [--config.KEY=VALUE ...]
"""

import contextlib

from nanosam import config as config_lib
from nanosam.run.cluster import joined
from nanosam.run.trainer import train
from nanosam.run.validate import validate
from nanosam.run.workdir import open_workdir
from nanosam.system import errors
from nanosam.system.signals import StopRequest


def main(argv: list[str]) -> None:
  if {"-h", "--help"} & {*argv[1:]}:
    keys = config_lib.flat(config_lib.default()).items()
    print(f"{__doc__}\nKeys and their defaults; nanosam/config.py explains each:")
    return print("\n".join(f"  --config.{key}={value}" for key, value in keys))
  config = config_lib.from_command_line(argv)
  validate(config)
  with StopRequest() as stop, joined(config.cluster, stop) as hosts:
    with stop.nothing_to_save():
      workdir = open_workdir(config, hosts)
    with contextlib.closing(workdir):
      train(config, workdir, stop, hosts)


if __name__ == "__main__":
  errors.run(main)
