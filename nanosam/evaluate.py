"""Evaluates a checkpoint on a fixed set of sequences or images: loss with its standard error, and
bits per byte or accuracy.

python -m nanosam.evaluate --workdir=DIR [--source=...] [--step=...] [--save] [--json]
"""

import json
import pathlib

from nanosam.data.sources import eval_set, source_of
from nanosam.run.evaluation import Evaluator
from nanosam.run.record import SEQUENCES_FILE
from nanosam.run.restore import load_run
from nanosam.system import errors
from nanosam.system.command_line import RunParser
from nanosam.system.errors import UsageError
from nanosam.system.remote import is_remote


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  other = args.source or args.step != "latest" or args.weights != "raw"
  if args.save and (other or is_remote(args.workdir)):
    raise UsageError("--save is only for the latest raw weights of a local run, on its own source")
  run = load_run(args.workdir, args.step, weights=args.weights)
  c = run.config
  name = args.source or c.data.source
  source = source_of(c.data, name)
  theirs, ours = source.coding, run.source.coding
  if theirs != ours:
    what = "other classes or sizes" if source.image_size else "another tokenizer"
    raise UsageError(
      f"{name} was prepared with {what} ({theirs[:12]}; the run's: {ours[:12]}), which the model "
      f"does not know: prepare that data again like {c.data.source}"
    )
  data = eval_set(source, c)
  evaluation = Evaluator(run.model, data, c.eval_batch_size, run.mesh)(run.params)
  if args.save:
    evaluation.save(pathlib.Path(args.workdir) / SEQUENCES_FILE, run.step)
  rows = len(data.batch.targets_BxL)
  if args.json:
    facts = {"step": run.step, "weights": args.weights, "source": name, "sequences": rows}
    facts |= {"documents": data.documents, "bytes": data.bytes}
    print(json.dumps({**facts, **evaluation.metrics()}))
  else:
    print(f"step {run.step} on {rows} rows of {name}:  {evaluation}")


def parser() -> RunParser:
  p = RunParser("evaluate", __doc__)
  p.add_argument("--source", default="", help="as data.source in a config (default: the run's own)")
  p.add_argument("--save", action="store_true", help=f"write the run's {SEQUENCES_FILE} again")
  p.add_argument("--json", action="store_true", help="print one JSON object")
  return p


if __name__ == "__main__":
  errors.run(main)
