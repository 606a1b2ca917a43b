"""Reproduces a table or figure of arXiv 2502.02407, in miniature or at the paper's scale.

python scripts/reproduce.py table1|...|table6|fig1|fig2|fig3|fig5 --scale=mini|paper --out=DIR
  [--stage=all|baseline|rho|seeds|compute|factors|tau|sharpness|prune|report]
  [--source=tokens:DIR] [--dry_run] ...

The stages are those of scripts/protocol.py; each can be run by itself, in as many sittings as it
takes: finished runs are skipped, others go on where they stopped. Runs lie in DIR/runs, shared by
all experiments with this DIR. After each stage DIR/EXPERIMENT holds results.json, table.md and
figures; `--stage=report` only writes these. `--dry_run` lists every run with tokens and FLOPs, and
with `--device=` device-hours.

Set NAME=VALUE arguments of the config with --set: --set=width=128 --set=steps=600.
"""

import argparse
import json
import os
import pathlib
import shlex
import time

from nanosam.paper import measures, protocol
from nanosam.paper.findings import write_report
from nanosam.paper.protocol import ADAMW, FACTORS, MEASURES, STAGES, Lab
from nanosam.run import flops
from nanosam.study import backends as launcher
from nanosam.study import runs, sweep
from nanosam.system import errors
from nanosam.system.command_line import Parser, numbers
from nanosam.system.errors import UsageError

DEVICES = {
  "v4": "TPU v4",
  "v5e": "TPU v5 lite",
  "v5p": "TPU v5",
  "v6e": "TPU v6 lite",
  "a100": "NVIDIA A100",
  "h100": "NVIDIA H100",
  "h200": "NVIDIA H200",
}


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  lab = make_lab(args)
  known = (*lab.stages, *lab.measures)
  stages = known if args.stage == "all" else (args.stage,)
  if args.stage not in ("all", "report", *known):
    raise UsageError(f"{lab.name} at scale {lab.scale} has the stages {', '.join(known)}")
  if args.dry_run:
    return print_costs(lab, [s for s in stages if s in lab.stages], args)
  remote = os.environ.get("NANOSAM_REMOTE", "") if args.backend == "tpu" else ""
  for stage in stages:
    if stage in MEASURES:
      measures.measure(lab, stage, say, remote)
    elif stage != "report" and launcher.QUEUED in run_stage(lab, stage, args, argv):
      return say(f"stage {stage} is in the queue: say the same again when it has run")
  write_report(lab, argv)


def parser() -> argparse.ArgumentParser:
  p = Parser("python scripts/reproduce.py", __doc__)
  p.add_argument("experiment", choices=protocol.EXPERIMENTS)
  p.add_argument("--scale", required=True, choices=("mini", "paper"))
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--stage", default="all", choices=("all", *STAGES, *MEASURES, "report"))
  p.add_argument("--source", default="", help="data.source (default: the config's)")
  p.add_argument("--seeds", type=int, default=Lab.seeds)
  p.add_argument("--factor_seeds", type=int, default=Lab.factor_seeds)
  p.add_argument("--methods", default="", help="comma-separated (default: the experiment's)")
  p.add_argument("--factors", default=",".join(FACTORS))
  p.add_argument("--learning_rates", type=numbers, default=Lab.learning_rates)
  p.add_argument("--decays", type=numbers, default=Lab.decays)
  p.add_argument("--rms", type=numbers, default=Lab.rms, help="of eps per coordinate")
  p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  p.add_argument("--device", choices=DEVICES, help="for device-hours")
  p.add_argument("--utilization", type=float, default=0.4, help="of the device's peak")
  launcher.add_backend_arguments(p)
  return p


def make_lab(args: argparse.Namespace) -> Lab:
  methods = tuple(m for m in args.methods.split(",") if m)
  known = protocol.EXPERIMENTS[args.experiment].methods
  if unknown := set(methods) - set(known):
    raise UsageError(f"{args.experiment} has no method {unknown.pop()}: {', '.join(known)}")
  if methods and ADAMW not in methods:
    methods = (ADAMW, *methods)  # everything is compared with it
  factors = tuple(f for f in args.factors.split(",") if f)
  if unknown := set(factors) - set(FACTORS):
    raise UsageError(f"no factor {unknown.pop()}: {', '.join(FACTORS)}")
  if min(args.seeds, args.factor_seeds, args.jobs) < 1 or not 0 < args.utilization <= 1:
    raise UsageError("--seeds, --factor_seeds and --jobs are at least 1, --utilization in (0, 1]")
  return Lab(
    name=args.experiment,
    scale=args.scale,
    out=args.out,
    source=args.source,
    seeds=args.seeds,
    factor_seeds=args.factor_seeds,
    methods=methods,
    factors=factors,
    learning_rates=args.learning_rates,
    decays=args.decays,
    rms=args.rms,
    arguments=dict(map(pair, args.set)),
    dry=args.dry_run,
  )


def pair(text: str) -> tuple[str, str]:
  name, separator, value = text.partition("=")
  if not separator:
    raise UsageError(f"--set={text}: write NAME=VALUE")
  return name, value


def say(line: str) -> None:
  print(line, flush=True)


def plan(lab: Lab, stage: str) -> list[sweep.Planned]:
  return sweep.plan(lab.stage(stage), lab.folder)


def run_stage(lab: Lab, stage: str, args: argparse.Namespace, argv: list[str]) -> set[str]:
  """Makes the runs that are missing; what became of them all."""
  for earlier in lab.stages[: lab.stages.index(stage)][:2]:  # those that tune
    if missing := protocol.unfinished(plan(lab, earlier)):
      say(f"warning: stage {earlier} is incomplete ({len(missing)} runs): {stage} builds on it")
  planned = plan(lab, stage)
  record_plan(lab, stage, planned, argv)
  say(f"{lab.name}, {lab.scale}, stage {stage}: {len(planned)} runs")
  ends = (runs.FINISHED, runs.DIVERGED)  # a run that diverges is a result
  outcomes = launcher.execute(planned, args.backend, args.jobs, say, done=ends)
  lab.forget()
  say(launcher.table(planned, outcomes))
  rest = {k: v for k, v in outcomes.items() if v != runs.DIVERGED}
  launcher.check_outcomes(rest, shlex.join(["python", *argv]))
  return set(outcomes.values())


def record_plan(lab: Lab, stage: str, planned: list[sweep.Planned], argv: list[str]) -> None:
  """What is about to be run, on record before any result is known."""
  lab.out.mkdir(parents=True, exist_ok=True)
  text = lab.out / "protocol.md"
  if not text.exists():
    text.write_text(protocol.__doc__ or "")
  entry = {
    "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    "command": argv,
    "experiment": lab.name,
    "stage": stage,
    "runs": [p.id for p in planned],
  }
  with open(lab.out / "protocol.jsonl", "a") as f:
    f.write(json.dumps(entry) + "\n")


def print_costs(lab: Lab, stages: list[str], args: argparse.Namespace) -> None:
  if not stages:
    return print(f"--stage={args.stage} trains nothing")
  peak = flops.PEAK_FLOPS[DEVICES[args.device]] * args.utilization if args.device else None
  unit = f"  {args.device}-hours" if peak else ""
  print(f"{'run':<60}  {'tokens':>9}  {'FLOPs':>9}{unit}")
  sums: dict[str, tuple[int, float]] = {}  # the same run may occur in two stages
  for stage in stages:
    print(f"{stage}:")
    for p in plan(lab, stage):
      cost = protocol.step_flops(p.config, lab.vocabulary) * p.config.opt.num_train_steps
      sums[p.id] = p.tokens, cost
      print(_cost_line(f"  {p.id}", p.tokens, cost, peak) + f"  {launcher.state(p)}")
  tokens, cost = (sum(x) for x in zip(*sums.values(), strict=True))
  print(_cost_line(f"{len(sums)} different runs", tokens, cost, peak))
  if peak:
    print(f"hours of one {DEVICES[args.device]} at {args.utilization:.0%} of its peak")
  print("FLOPs are those executed, recomputation (model.remat) included")
  print("settings that a stage still has to tune are placeholders, which cost the same")


def _cost_line(name: str, tokens: float, cost: float, peak: float | None) -> str:
  hours = f"  {cost / peak / 3600:>{9}.4g}" if peak else ""
  return f"{name:<60}  {tokens:>9.3g}  {cost:>9.3g}{hours}"


if __name__ == "__main__":
  errors.run(main)
