"""Measures how sharp the minimum is that a run has found.

python -m nanosam.sharpness --workdir=DIR [--step=...] [--batches=4] [--measures=...] [--out=DIR]

Writes sharpness.json and figures to the workdir (or to --out). The loss L is the mean over the
first rows of the validation split, in fp32; only the taus are computed batch by batch and then
averaged: they are about what a training step sees. What --measures can choose:

  taus         shares of the logit and the functional path in H d (arXiv 2502.02407, Eq. 9)
  traces       of the Hessian H, its Gauss-Newton part H_G and H_F = H - H_G
  eigenvalues  largest and smallest of H, largest of H_G; the loss along the top eigenvector and
               along random directions, with a figure
  rise         L(theta + eps) - L(theta): for eps = rho g / |g| (SAM's first order), preconditioned,
               and the highest in the ball |eps| <= rho that a few steps of gradient ascent find
  critical     2 / eta_c, with eta_c the step size along the gradient (or the optimizer's update)
               at which L rises above its value (arXiv 2601.16979); forward passes alone
  density      of the eigenvalues of H, by stochastic Lanczos quadrature, with a figure
  pac_bayes    a bound on the error under Gaussian noise, from training data; mostly vacuous

All but the last two unless said otherwise. What was measured before of the same model on the same
rows stays in sharpness.json.
"""

import argparse
import math

from nanosam.curvature.sharpness import FILE, MEASURES, USUAL, measure, table, with_earlier
from nanosam.run.restore import load_run
from nanosam.study import figures
from nanosam.system import errors
from nanosam.system.command_line import RunParser, numbers, results_folder
from nanosam.system.errors import need
from nanosam.system.files import write_json

SIGMAS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  check(args)
  figures.check_installed()
  out = results_folder(args)
  found = measure(load_run(args.workdir, args.step, True, args.weights), args)
  write_json(out / FILE, with_earlier(found, out / FILE))
  print(table(found))
  drawn = []
  if "landscape" in found:
    figures.landscape(out / "sharpness", found)
    drawn.append("sharpness.png")
  if "density" in found:
    figures.density(out / "density", found["density"])
    drawn.append("density.png")
  print(f"written: {', '.join([str(out / FILE), *drawn])}")


def parser() -> RunParser:
  add = (p := RunParser("sharpness", __doc__)).add_argument
  add(
    "--measures",
    type=lambda text: tuple(text.split(",")),
    default=USUAL,
    help=f"comma-separated, of {', '.join(MEASURES)} (default {','.join(USUAL)})",
  )
  add("--batches", type=int, default=4, help="to average over (default 4)")
  add("--batch_size", type=int, default=0, help="sequences of each (default: the run's)")
  add(
    "--residual",
    type=float,
    default=0.01,
    help="of eigenvalues of H in fp32, relative (default 0.01)",
  )
  add("--iterations", type=int, default=200, help="of Lanczos at most (default 200)")
  add("--sem", type=float, default=0.03, help="standard error of traces, relative (default 0.03)")
  add("--probes", type=int, default=256, help="for the traces, at most (default 256)")
  add("--rho", type=numbers, default=(0.01, 0.03, 0.1, 0.3, 1.0), help="radii, comma-separated")
  add("--ascent_steps", type=int, default=5, help="gradients by radius, for the ball (default 5)")
  add("--density_probes", type=int, default=4, help="random vectors (default 4)")
  add("--density_steps", type=int, default=64, help="products from each of them (default 64)")
  add("--sigma", type=numbers, default=SIGMAS, help="of the noise for pac_bayes, comma-separated")
  add("--draws", type=int, default=32, help="of that noise (default 32)")
  add("--delta", type=float, default=0.05, help="chance that the bound is wrong (default 0.05)")
  add("--directions", type=int, default=2, help="random ones in the figure (default 2)")
  add("--seed", type=int, default=0, help="of all that is random (default 0)")
  add("--out", default="", help="folder of the results (default: the workdir)")
  return p


def check(args: argparse.Namespace) -> None:
  lows = {"batches": 1, "batch_size": 0, "iterations": 1, "probes": 2, "directions": 0, "seed": 0}
  lows |= {"ascent_steps": 1, "density_probes": 1, "density_steps": 1, "draws": 1}
  for name in args.measures:
    need(name in MEASURES, f"--measures: there is no {name!r}; choose of {', '.join(MEASURES)}")
  for name, low in lows.items():
    value = getattr(args, name)
    need(value >= low, f"--{name}={value} must be at least {low}")
  need(args.seed < 2**32, f"--seed={args.seed} must be less than 2**32")
  for name in ("residual", "sem", "delta"):
    value = getattr(args, name)
    need(0 < value < 1, f"--{name}={value} must be between 0 and 1")
  for name, what in (("rho", "radii"), ("sigma", "scales")):
    values = getattr(args, name)
    positive = all(math.isfinite(x) and x > 0 for x in values)
    need(positive, f"--{name}={','.join(map(str, values))}: {what} must be positive")


if __name__ == "__main__":
  errors.run(main)
