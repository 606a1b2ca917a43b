"""Compares runs: what is better, by how much, and how sure that is.

python -m nanosam.compare DIR... [--by=opt.method] [--tune=opt.rho,...] [--baseline=adamw]
  [--view=steps|compute|time] [--target=LOSS] [--confidence=0.95] [--json]

Runs that agree in the --by keys are a group; in a group, runs that agree in the --tune keys are a
cell, and its runs differ by seed alone. The best cell of each group, judged on the seeds that all
its cells have, is compared with the baseline's best cell, run by run: only runs with the same seed
and data_seed are paired, which takes the luck of the draw that both share out of the difference.

Three intervals, each by Student's t (see nanosam/paired.py):
  both    other seeds, data orders and eval text: the one to quote, from two pairs on
  seeds   other seeds and data orders, on this eval set
  units   other eval text, for these very runs; all there is with one pair, and it says nothing
          about seeds
No interval covers the choice of the best cell: a seed that took part in tuning flatters its group.

Views: the loss after the last step; at the largest compute (or training time) that all runs
reached, read off the eval curves. A curve read before its end is in mid-schedule, where the
learning rate is still high: for a fair race train with a schedule for that budget.
"""

import json

from nanosam.study.comparison import AXES, compare, text
from nanosam.study.runs import FINISHED, find_runs
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import strict_json


def main(argv: list[str]) -> None:
  p = Parser("python -m nanosam.compare", __doc__)
  p.add_argument("folders", nargs="+", metavar="DIR", help="workdirs, or folders that hold them")
  p.add_argument("--by", default="opt.method", help="keys that make groups")
  p.add_argument("--tune", default="", help="keys of which each group takes its best value")
  p.add_argument("--baseline", default="adamw", help="the group to compare with")
  p.add_argument("--view", default="steps", choices=AXES)
  p.add_argument("--target", type=float, help="a loss (default: the baseline's)")
  p.add_argument("--confidence", type=float, default=0.95)
  p.add_argument("--json", action="store_true", help="print one JSON object")
  args = p.parse_args(argv[1:])
  if not 0 < args.confidence < 1:
    raise UsageError(f"--confidence={args.confidence} must lie between 0 and 1")
  runs, notes = find_runs(args.folders)
  if notes and not any(r.state == FINISHED for r in runs):
    raise UserError(f"no finished run to compare; {notes[0]}")
  report = compare(
    runs,
    by=args.by.split(","),
    tune=[k for k in args.tune.split(",") if k],
    baseline=args.baseline,
    view=args.view,
    target=args.target,
    confidence=args.confidence,
  )
  report.notes = notes + report.notes
  print(json.dumps(strict_json(report.to_json()), indent=2) if args.json else text(report))


if __name__ == "__main__":
  errors.run(main)
