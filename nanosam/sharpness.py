"""Measures how sharp the minimum is that a run has found.

python -m nanosam.sharpness --workdir=DIR [--step=...] [--batches=4] [--out=DIR]

Writes sharpness.json and a figure to the workdir (or to --out): the largest and the smallest
eigenvalue of the Hessian H, the largest of its Gauss-Newton part H_G, the traces of H, H_G and
H_F = H - H_G, the taus of arXiv 2502.02407 (Eq. 9), SAM's sharpness L(theta + eps) - L(theta), and
the loss along the top eigenvector and random directions. The loss is the mean over the first rows
of the validation split, in fp32. Only the taus are computed batch by batch and then averaged: they
are about what a training step sees.
"""

import argparse
import math

from nanosam.curvature.sharpness import FILE, measure, table
from nanosam.run.restore import load_run
from nanosam.study import figures
from nanosam.system import errors
from nanosam.system.command_line import RunParser, numbers, results_folder
from nanosam.system.errors import need
from nanosam.system.files import write_json


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  check(args)
  figures.check_installed()
  out = results_folder(args)
  found = measure(load_run(args.workdir, args.step, True, args.weights), args)
  write_json(out / FILE, found)
  print(table(found))
  figures.landscape(out / "sharpness", found)
  print(f"written: {out / FILE} and its figure")


def parser() -> RunParser:
  add = (p := RunParser("sharpness", __doc__)).add_argument
  add("--batches", type=int, default=4, help="to average over (default 4)")
  add("--batch_size", type=int, default=0, help="sequences of each (default: the run's)")
  add("--residual", type=float, default=0.01, help="of eigenvalues, relative (default 0.01)")
  add("--iterations", type=int, default=200, help="of Lanczos at most (default 200)")
  add("--sem", type=float, default=0.03, help="standard error of traces, relative (default 0.03)")
  add("--probes", type=int, default=256, help="for the traces, at most (default 256)")
  add("--rho", type=numbers, default=(0.01, 0.03, 0.1, 0.3, 1.0), help="radii, comma-separated")
  add("--directions", type=int, default=2, help="random ones in the figure (default 2)")
  add("--seed", type=int, default=0, help="of all that is random (default 0)")
  add("--out", default="", help="folder of the results (default: the workdir)")
  return p


def check(args: argparse.Namespace) -> None:
  lows = {"batches": 1, "batch_size": 0, "iterations": 1, "probes": 2, "directions": 0, "seed": 0}
  for name, low in lows.items():
    value = getattr(args, name)
    need(value >= low, f"--{name}={value} must be at least {low}")
  need(args.seed < 2**32, f"--seed={args.seed} must be less than 2**32")
  for name in ("residual", "sem"):
    value = getattr(args, name)
    need(0 < value < 1, f"--{name}={value} must be between 0 and 1")
  positive = all(math.isfinite(rho) and rho > 0 for rho in args.rho)
  need(positive, f"--rho={','.join(map(str, args.rho))}: radii must be positive")


if __name__ == "__main__":
  errors.run(main)
