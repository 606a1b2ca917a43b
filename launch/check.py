"""Checks a run before machines are rented for it: its config, and that they can reach its data.

python launch/check.py --config=FILE.py[:k=v,...] [--config.KEY=VALUE ...]
"""

import pathlib

from nanosam import config as config_lib
from nanosam.run import own_method
from nanosam.run.validate import validate
from nanosam.system import errors
from nanosam.system.errors import need
from nanosam.system.remote import is_remote

HERE = pathlib.Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> None:
  c = config_lib.from_command_line(argv)
  validate(c)
  need(
    is_remote(c.workdir),
    "the machines' disks are deleted with them: set --config.workdir=gs://BUCKET/RUN",
  )
  own = own_method.split(c.opt.method)
  need(
    not own or HERE in pathlib.Path(own[0]).parents,
    f"only files below {HERE} are sent to the machines: put the method of {c.opt.method} there",
  )
  kind, _, place = c.data.source.partition(":")
  need(
    kind not in ("tokens", "images") or is_remote(place),
    f"data.source={c.data.source} is on this machine: copy it to a bucket, and set "
    f"--config.data.source={kind}:gs://BUCKET/DATA",
  )
  tokens = c.opt.num_train_steps * c.batch_size * c.model.L
  print(f"{c.opt.method}: {c.opt.num_train_steps} steps, {tokens:.3g} tokens, into {c.workdir}")


if __name__ == "__main__":
  errors.run(main)
