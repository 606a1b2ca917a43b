"""Draws the loss curve of a run, or its taus.

python -m nanosam.plots --workdir=DIR --out=FILE [--what=loss|tau|tau_precond]
"""

import pathlib

from nanosam.run.record import read_config
from nanosam.study.figures import files_of, read_taus, run_curve, taus
from nanosam.system import errors
from nanosam.system.command_line import Parser


def main(argv: list[str]) -> None:
  p = Parser("python -m nanosam.plots", __doc__)
  p.add_argument("--workdir", type=pathlib.Path, required=True)
  p.add_argument("--out", type=pathlib.Path, required=True, help="without .svg and .png")
  p.add_argument("--what", default="loss", choices=("loss", "tau", "tau_precond"))
  args = p.parse_args(argv[1:])
  read_config(args.workdir)  # raises if there is no run
  if args.what == "loss":
    run_curve(args.out, args.workdir)
  else:
    taus(args.out, {args.workdir.name: read_taus([args.workdir], args.what)})
  print(f"written: {' and '.join(map(str, files_of(args.out)))}")


if __name__ == "__main__":
  errors.run(main)
