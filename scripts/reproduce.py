"""Reproduces a table or figure of arXiv 2502.02407, in miniature or at the paper's scale.

python scripts/reproduce.py table1|...|table6|fig1|...|fig5|outputs|vision --scale=mini|paper
  --out=DIR [--stage=all|baseline|rho|seeds|compute|factors|tau|sharpness|prune|report]
  [--source=tokens:DIR] [--images=images:DIR] [--dry_run] ...

nanosam/paper/protocol.py describes the stages. Each can be run alone, and interrupted at any time:
finished runs are skipped, others resume. Runs are in DIR/runs, shared by all experiments with this
DIR. After each stage DIR/EXPERIMENT has results.json, table.md and figures; `--stage=report` only
writes these. `--dry_run` lists every run with tokens and FLOPs, and with `--device=` device-hours.

--set changes arguments of the config: --set=width=128 --set=steps=600. fig2 and fig4 show language
beside vision; `outputs` does so with 64 to 4096 pieces and 2 or 10 classes, where --source may
contain {vocab_size}; `vision` compares methods on images (--learning_rates=1e-3,2e-3,4e-3).

python scripts/reproduce.py simplicity --out=DIR [--seeds=100] [--set=NAME=VALUE ...]
is an experiment of its own, minutes on one core: nanosam/paper/simplicity/experiment.py.

python scripts/reproduce.py regimes --regime=limited|online|overtrained --source=tokens:DIR
  --out=DIR --seeds=N [--stage=all|pilot|tuning|verdict|compute|report] [--jobs=N]
tunes every method as hard as AdamW, then compares on fresh seeds: nanosam/paper/regimes.py.

python scripts/reproduce.py survive RUNS... --out=DIR [--tune=opt.rho,...] [--source=...] ...
takes the best setting of each method among finished runs and does what nanosam.survive does, with
its options: results.json, table.md and figures in DIR. The same command resumes.
python scripts/reproduce.py lever --source=tokens:DIR --other=tokens:DIR --out=DIR --seeds=N
  [--stage=all|proxy|weights|tuning|verdict|compute|measure|report] [--set=NAME=VALUE ...]
shows hard documents of a store twice, with controls: nanosam/paper/lever/study.py.
"""

import argparse
import os
import pathlib

from nanosam.paper import measures, regimes, stages
from nanosam.paper.experiments import EXPERIMENTS, MEASURES, STAGES
from nanosam.paper.findings import write_report
from nanosam.paper.lever import report as lever_report
from nanosam.paper.lever import study as lever
from nanosam.paper.protocol import FACTORS, Lab
from nanosam.paper.simplicity import command as simplicity
from nanosam.paper.simplicity.experiment import Settings
from nanosam.run.flops import DEVICES
from nanosam.study import figures, survival
from nanosam.study.backends import add_backend_arguments, say, state
from nanosam.system import errors
from nanosam.system.command_line import Parser, add_model_arguments, numbers
from nanosam.system.errors import UsageError


def main(argv: list[str]) -> None:
  if argv[1:2] == ["simplicity"]:
    return reproduce_simplicity(argv)
  if argv[1:2] == ["regimes"]:
    return reproduce_regimes(argv)
  if argv[1:2] == ["survive"]:
    return reproduce_survive(argv)
  if argv[1:2] == ["lever"]:
    return reproduce_lever(argv)
  args = parser().parse_args(argv[1:])
  lab = make_lab(args)
  known = (*lab.stages, *lab.measures)
  if args.stage not in ("all", "report", *known):
    raise UsageError(f"{lab.name} at scale {lab.scale} has the stages {', '.join(known)}")
  chosen = known if args.stage == "all" else (args.stage,)
  if args.dry_run:
    trained = [s for s in chosen if s in lab.stages]
    if not trained:
      return print(f"--stage={args.stage} trains nothing")
    for line in stages.costs(lab, trained, args.device, args.utilization):
      print(line)
    return
  remote = os.environ.get("NANOSAM_REMOTE", "") if args.backend == "tpu" else ""
  for stage in chosen:
    if stage in MEASURES:
      measures.measure(lab, stage, say, remote)
    elif stage in STAGES and not stages.train(lab, stage, args.backend, args.jobs, argv):
      return say(f"stage {stage} is in the queue: run the same command again when it is done")
  write_report(lab, argv)


def reproduce_simplicity(argv: list[str]) -> None:
  p = Parser("python scripts/reproduce.py simplicity", __doc__)
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--seeds", type=int, default=Settings.seeds)
  p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  args = p.parse_args(argv[2:])
  simplicity.run(args.out, simplicity.changed(Settings(seeds=args.seeds), args.set), argv, say)


def reproduce_regimes(argv: list[str]) -> None:
  p = Parser("python scripts/reproduce.py regimes", __doc__)
  p.add_argument("--regime", required=True, choices=regimes.REGIMES)
  p.add_argument("--source", required=True, help="data.source, a token store")
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--seeds", required=True, type=int, help="of the verdict")
  p.add_argument("--stage", default="all", choices=("all", *regimes.STAGES, "report"))
  add_backend_arguments(p)
  args = p.parse_args(argv[2:])
  if min(args.seeds, args.jobs) < 1:
    raise UsageError("--seeds and --jobs are at least 1")
  study = regimes.Study(args.regime, args.out, args.source, args.seeds)
  chosen = regimes.STAGES if args.stage == "all" else (args.stage,)
  if args.dry_run:
    for job in (job for stage in chosen if stage != "report" for job in study.jobs(stage)):
      print(f"{job.id}  {job.tokens:.3g} tokens  {state(job)}")
    return
  for stage in chosen:
    if stage != "report":
      regimes.train(study, stage, args.backend, args.jobs, argv)
  regimes.write_report(study, argv)


def reproduce_survive(argv: list[str]) -> None:
  p = Parser("python scripts/reproduce.py survive", f"{__doc__}\n{survival.__doc__}")
  p.add_argument("folders", nargs="+", metavar="RUNS", help="workdirs, or folders of workdirs")
  p.add_argument("--out", required=True, type=pathlib.Path)
  add_model_arguments(p)
  survival.add_arguments(p)
  args = p.parse_args(argv[2:])
  survival.check(args)
  figures.check_installed()
  survival.study(args.folders, args, args.out, argv)
  say(f"written: {args.out}/results.json, table.md and figures")


def reproduce_lever(argv: list[str]) -> None:
  p = Parser("python scripts/reproduce.py lever", __doc__)
  p.add_argument("--source", required=True, help="data.source, a token store")
  p.add_argument("--other", required=True, help="another store, of the same tokenizer")
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--seeds", required=True, type=int, help="of the verdict")
  p.add_argument("--stage", default="all", choices=("all", *lever.STAGES, "report"))
  p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  add_backend_arguments(p)
  args = p.parse_args(argv[2:])
  if min(args.seeds, args.jobs) < 1:
    raise UsageError("--seeds and --jobs are at least 1")
  settings = lever.changed(args.set)
  study = lever.Lever(args.out, args.source, args.other, args.seeds, settings)
  chosen = lever.STAGES if args.stage == "all" else (args.stage,)
  if args.dry_run:
    trained = [stage for stage in chosen if stage in lever.TRAINED]
    for job in (job for stage in trained for job in study.jobs(stage)):
      print(f"{job.id}  {job.tokens:.3g} tokens  {state(job)}")
    return
  for stage in chosen:
    if stage in lever.TRAINED:
      regimes.train(study, stage, args.backend, args.jobs, argv)
    elif stage == "weights":
      lever.make_weights(study, say)
    elif stage == "measure":
      lever_report.measure(study, say)
  lever_report.write_report(study, argv)


def parser() -> argparse.ArgumentParser:
  p = Parser("python scripts/reproduce.py", __doc__)
  p.add_argument("experiment", choices=EXPERIMENTS)
  p.add_argument("--scale", required=True, choices=("mini", "paper"))
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--stage", default="all", choices=("all", *STAGES, *MEASURES, "report"))
  p.add_argument("--source", default="", help="data.source (default: the config's)")
  p.add_argument("--images", default="", help="data.source in vision (default: digits)")
  p.add_argument("--seeds", type=int, default=Lab.seeds)
  p.add_argument("--factor_seeds", type=int, default=Lab.factor_seeds)
  p.add_argument("--methods", default="", help="comma-separated (default: the experiment's)")
  p.add_argument("--factors", default=",".join(FACTORS))
  p.add_argument("--learning_rates", type=numbers, default=Lab.learning_rates)
  p.add_argument("--decays", type=numbers, default=Lab.decays)
  p.add_argument("--rms", type=numbers, default=Lab.rms, help="of eps per coordinate")
  p.add_argument("--targets", type=int, default=0, help="tokens or images to measure taus on")
  p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  p.add_argument("--device", choices=DEVICES, help="for device-hours")
  p.add_argument("--utilization", type=float, default=0.4, help="of the device's peak")
  add_backend_arguments(p)
  return p


def make_lab(args: argparse.Namespace) -> Lab:
  if min(args.seeds, args.factor_seeds, args.jobs) < 1 or not 0 < args.utilization <= 1:
    raise UsageError("--seeds, --factor_seeds and --jobs are at least 1, --utilization in (0, 1]")
  for text in args.set:
    if "=" not in text:
      raise UsageError(f"--set={text}: write NAME=VALUE")
  names = (
    "source",
    "images",
    "seeds",
    "factor_seeds",
    "learning_rates",
    "decays",
    "rms",
    "targets",
  )
  return Lab(
    args.experiment,
    args.scale,
    args.out,
    methods=tuple(filter(None, args.methods.split(","))),
    factors=tuple(filter(None, args.factors.split(","))),
    arguments=dict(text.split("=", 1) for text in args.set),
    dry=args.dry_run,
    **{name: getattr(args, name) for name in names},
  )


if __name__ == "__main__":
  errors.run(main)
