"""Trains a model of text or images.

python -m nanosam.train --config=configs/FILE.py[:k=v,...] [--config.KEY=VALUE ...]
"""

from nanosam import config as config_lib
from nanosam.curvature.diagnostics import Diagnostics
from nanosam.run.trainer import train
from nanosam.system import errors


def main(argv: list[str]) -> None:
  if {"-h", "--help"} & {*argv[1:]}:
    keys = config_lib.flat(config_lib.default()).items()
    print(f"{__doc__}\nKeys and their defaults; nanosam/config.py explains each:")
    return print("\n".join(f"  --config.{key}={value}" for key, value in keys))
  train(config_lib.from_command_line(argv), make_diagnostics=Diagnostics)


if __name__ == "__main__":
  errors.run(main)
