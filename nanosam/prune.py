"""Prunes a model: eval loss after setting its smallest weights to zero, without retraining.

python -m nanosam.prune --workdir=DIR [--compare DIR ...] [--sparsity=0,0.1,...] [--params=REGEX]

Weights are ranked by magnitude over all matrices together. Writes prune.json and a figure of eval
loss against sparsity (Figure 5 of arXiv 2502.02407) to the workdir, or to --out.
"""

from nanosam.curvature.pruning import FILE, check, curve, table
from nanosam.run.restore import load_run
from nanosam.study import figures
from nanosam.system import errors
from nanosam.system.command_line import RunParser, numbers, results_folder
from nanosam.system.files import write_json


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  check(args)
  figures.check_installed()
  out = results_folder(args)
  first, *others = (
    curve(load_run(workdir, args.step, weights=args.weights), workdir, args)
    for workdir in (args.workdir, *args.compare)
  )
  found = {**first, "compared": others}
  write_json(out / FILE, found)
  print(table([first, *others]))
  figures.pruning(out / "prune", [first, *others])
  print(f"written: {out / FILE} and its figure")


def parser() -> RunParser:
  add = (p := RunParser("prune", __doc__)).add_argument
  add("--compare", nargs="+", default=[], metavar="DIR", help="workdirs of more runs")
  add(
    "--sparsity",
    type=numbers,
    default=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    help="fractions of the weights to remove, comma-separated",
  )
  add(
    "--params",
    default="kernel|embed",
    help="regex of the parameters to prune (default 'kernel|embed': all matrices; 'kernel' leaves "
    "out the embeddings, '.*' includes the norms)",
  )
  add("--out", default="", help="folder of the results (default: the workdir)")
  return p


if __name__ == "__main__":
  errors.run(main)
