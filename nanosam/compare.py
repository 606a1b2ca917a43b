"""Compares runs: which is better, by how much, and how sure that is.

python -m nanosam.compare DIR... [--by=opt.method] [--tune=opt.rho,...] [--baseline=NAME]
  [--view=steps|compute|time] [--target=LOSS] [--confidence=0.95]
  [--format=plain|markdown|csv|latex] [--json]
"""

import json

from nanosam.study import comparison, tables
from nanosam.study.runs import FINISHED, find_runs
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UsageError, UserError, nearest
from nanosam.system.files import strict_json


def main(argv: list[str]) -> None:
  p = Parser("python -m nanosam.compare", f"{__doc__}\n{comparison.__doc__}")
  p.add_argument("folders", nargs="+", metavar="DIR", help="workdirs, or folders of workdirs")
  p.add_argument("--by", default="opt.method", help="keys that form groups")
  p.add_argument("--tune", default="", help="keys for which each group takes its best value")
  p.add_argument("--baseline", help="the group to compare with (adamw; by data.weights: none)")
  p.add_argument("--view", default="steps", choices=comparison.VIEWS)
  p.add_argument("--target", type=float, help="a loss (default: the baseline's)")
  p.add_argument("--confidence", type=float, default=comparison.CONFIDENCE)
  p.add_argument("--format", default="plain", choices=tables.FORMATS, help="plain has notes too")
  p.add_argument("--json", action="store_true", help="print one JSON object")
  args = p.parse_args(argv[1:])
  if not 0 < args.confidence < 1:
    raise UsageError(f"--confidence={args.confidence} must be between 0 and 1")
  runs, notes = find_runs(args.folders)
  if notes and not any(r.state == FINISHED for r in runs):
    raise UserError(f"no finished run to compare; {notes[0]}")
  usual = "none" if args.by == "data.weights" else comparison.ADAMW
  report = comparison.compare(
    runs,
    by=args.by.split(","),
    tune=[k for k in args.tune.split(",") if k],
    baseline=args.baseline or usual,
    view=args.view,
    target=args.target,
    confidence=args.confidence,
  )
  if args.baseline and not report.group(report.baseline):
    labels = [g.label for g in report.groups]
    raise UsageError(f"no group is --baseline={args.baseline}: {nearest(args.baseline, labels)}")
  report.notes = notes + report.notes
  if args.json:
    print(json.dumps(strict_json(report.to_json()), indent=2))
  elif args.format == "plain":
    print(comparison.text(report))
  else:
    print("\n".join(tables.FORMATS[args.format](comparison.table(report))))


if __name__ == "__main__":
  errors.run(main)
