"""Changes a trained model and evaluates it again: how much of its loss survives?

python -m nanosam.survive --workdir=DIR [--compare DIR ...] [--parts=noise,bits,prune,forgetting]
  [--source=...] [--noise=0.03,...] [--bits=8,...] [--group=32] [--sparsity=0.1,...]

  noise       Gaussian, relative to the RMS of each matrix; several draws
  bits        rounding to the nearest value, with one scale for each output channel, or for every
              --group inputs of it
  prune       the smallest weights become zero, ranked over all matrices together
  forgetting  fine-tuning on --source, a training run of its own below finetuned/ that resumes;
              the loss on the old text, and as `learning` on the new one, along the way

Writes survive.json and a figure of each part to the workdir, or to --out. --compare groups runs by
method and pairs them by seed, as nanosam.compare does, with the same --by, --tune and --baseline.
"""

from nanosam.curvature.survival import FILE
from nanosam.study import figures, survival, tables
from nanosam.system import errors
from nanosam.system.command_line import RunParser, results_folder
from nanosam.system.files import write_json


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  survival.check(args)
  figures.check_installed()
  out = results_folder(args)
  runs, found = survival.measure([args.workdir, *args.compare], args, out)
  compared, notes = survival.compare(runs, found, args)
  first, *others = (s.to_json() for s in found)
  write_json(out / FILE, {**first, "compared": others, "comparison": compared, "notes": notes})
  for name, table in survival.tables_of(compared).items():
    print("\n".join([name, *tables.plain(table), ""]))
  for line in [*(f"the interval covers {w}" for w in survival.covered(compared)), *notes]:
    print(line)
  drawn = survival.draw(compared, out, args.baseline)
  print(f"written: {', '.join([str(out / FILE), *drawn])}")


def parser() -> RunParser:
  p = RunParser("survive", __doc__)
  p.add_argument("--compare", nargs="+", default=[], metavar="DIR", help="workdirs of more runs")
  p.add_argument("--out", default="", help="folder of the results (default: the workdir)")
  survival.add_arguments(p)
  return p


if __name__ == "__main__":
  errors.run(main)
