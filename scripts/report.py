"""Writes a page about runs and results: tables beside the paper's, curves, rho, curvature, cost.

python scripts/report.py DIR... --out=DIR

DIR holds workdirs (of nanosam.train, launch/sweep.py) or the output of scripts/reproduce.py, at any
depth. Writes OUT/report.html, which is self-contained, and OUT/report.md with its figures. Runs are
sorted into sets that may be compared with each other; unfinished and damaged ones are listed and
left out.
"""

import pathlib

from nanosam.paper import report
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import say


def main(argv: list[str]) -> None:
  p = Parser("scripts/report.py", __doc__)
  p.add_argument("folders", nargs="+", metavar="DIR", type=pathlib.Path)
  p.add_argument("--out", required=True, type=pathlib.Path)
  args = p.parse_args(argv[1:])
  for note in report.write(args.folders, args.out):
    say(note)
  print(f"written: {args.out / 'report.html'}, {args.out / 'report.md'}", flush=True)


if __name__ == "__main__":
  errors.run(main)
