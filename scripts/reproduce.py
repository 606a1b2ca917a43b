"""Reproduces a table or figure of arXiv 2502.02407, in miniature or at the paper's scale.

python scripts/reproduce.py table1|table2|table3|table5|fig1|fig3 --scale=mini|paper --out=DIR
  [--stage=all|baseline|rho|seeds|compute|factors|report] [--source=tokens:DIR] [--dry_run] ...

The stages are those of scripts/protocol.py; each can be run by itself, in as many sittings as it
takes: finished runs are skipped, others go on where they stopped. Runs lie in DIR/runs, shared by
all experiments with this DIR. After each stage DIR/EXPERIMENT holds results.json, table.md and
figures; `--stage=report` only writes these. `--dry_run` lists every run with tokens and FLOPs, and
with `--device=` device-hours.

Set NAME=VALUE arguments of the config with --set: --set=width=128 --set=steps=600.
"""

import argparse
import json
import math
import pathlib
import shlex
import sys
import time
from typing import Any

import paper_results
import protocol
from protocol import ADAMW, FACTORS, RHO, STAGES, Lab, Setting

sys.path.insert(0, str(protocol.ROOT / "launch"))
import sweep as launcher

from nanosam import compare, errors, flops, plots, runs, sweep
from nanosam.errors import UsageError, UserError
from nanosam.workdir import write_atomically

DEVICES = {
  "v4": "TPU v4",
  "v5e": "TPU v5 lite",
  "v5p": "TPU v5",
  "v6e": "TPU v6 lite",
  "a100": "NVIDIA A100",
  "h100": "NVIDIA H100",
  "h200": "NVIDIA H200",
}
CONFIDENCE = 0.95


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  lab = make_lab(args)
  stages = lab.stages if args.stage == "all" else (args.stage,)
  if args.stage not in ("all", "report", *lab.stages):
    raise UsageError(f"{lab.name} at scale {lab.scale} has the stages {', '.join(lab.stages)}")
  if args.dry_run:
    return print_costs(lab, [s for s in stages if s != "report"], args)
  for stage in stages:
    if stage != "report":
      run_stage(lab, stage, args, argv)
  write_report(lab, argv)


def parser() -> argparse.ArgumentParser:
  p = launcher.Arguments("scripts/reproduce.py", description=__doc__, allow_abbrev=False)
  p.formatter_class = argparse.RawDescriptionHelpFormatter
  p.add_argument("experiment", choices=protocol.EXPERIMENTS)
  p.add_argument("--scale", required=True, choices=("mini", "paper"))
  p.add_argument("--out", required=True, type=pathlib.Path)
  p.add_argument("--stage", default="all", choices=("all", *STAGES, "report"))
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


def numbers(text: str) -> tuple[float, ...]:
  return tuple(float(x) for x in text.split(","))


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
    arguments=dict(item.split("=", 1) for item in args.set),
    dry=args.dry_run,
  )


def say(line: str) -> None:
  print(line, flush=True)


def plan(lab: Lab, stage: str) -> list[sweep.Planned]:
  return sweep.plan(lab.stage(stage), lab.out / "runs")


def run_stage(lab: Lab, stage: str, args: argparse.Namespace, argv: list[str]) -> None:
  for earlier in lab.stages[: lab.stages.index(stage)][:2]:  # those that tune
    if missing := protocol.unfinished(plan(lab, earlier)):
      say(f"warning: stage {earlier} is incomplete ({len(missing)} runs): {stage} builds on it")
  planned = plan(lab, stage)
  record_plan(lab, stage, planned, argv)
  say(f"{lab.name}, {lab.scale}, stage {stage}: {len(planned)} runs")
  outcomes = launcher.execute(planned, args.backend, args.jobs, say)
  lab.forget()
  say(launcher.table(planned, outcomes))
  # A run that diverges is a result.
  rest = {k: v for k, v in outcomes.items() if v != runs.DIVERGED}
  launcher.check_outcomes(rest, shlex.join(["python", *argv]))


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


def write_report(lab: Lab, argv: list[str]) -> None:
  notes = lab.found[1]
  reports = {s.label: lab.report(s) for s in lab.settings}
  if not any(reports.values()):
    raise UserError(
      f"{lab.name} has no finished runs in {lab.out / 'runs'} yet; begin with: "
      f"{command(lab, lab.stages[0])}"
    )
  folder = lab.out / lab.name
  folder.mkdir(parents=True, exist_ok=True)
  extras = {s.label: extra_reports(lab, s) for s in lab.settings}
  results = {
    "experiment": lab.name,
    "scale": lab.scale,
    "command": argv,
    "settings": {k: r.to_json() for k, r in reports.items() if r},
    "more": {k: {n: r.to_json() for n, r in e.items()} for k, e in extras.items()},
    "paper": paper_results.TABLES.get(lab.name) or paper_results.FIGURES.get(lab.name),
    "notes": notes,
  }
  content = json.dumps(compare.strict_json(results), indent=2)
  write_atomically(folder / "results.json", content.encode())
  lines = [f"# {lab.name}, {lab.scale}", "", f"`python {shlex.join(argv)}`", ""]
  for setting in lab.settings:
    lines += section(lab, setting, reports[setting.label], extras[setting.label])
  lines += closing(lab, notes)
  write_atomically(folder / "table.md", "\n".join(lines).encode())
  draw(lab, reports, folder)
  print(f"written: {folder}/results.json, table.md and figures", flush=True)


def command(lab: Lab, stage: str) -> str:
  source = f" --source={lab.source}" if lab.source else ""
  return (
    f"python scripts/reproduce.py {lab.name} --scale={lab.scale} --out={lab.out}{source} "
    f"--stage={stage}"
  )


def extra_reports(lab: Lab, setting: Setting) -> dict[str, compare.Report]:
  """Equal compute, and a report for each factor that has runs."""
  more = {}
  if "compute" in lab.stages:
    more |= equal_compute(lab, setting)
  if "factors" in lab.stages:
    for factor in lab.factors:
      report = lab.report(setting, lab.factor(setting, factor))
      if report and len(report.groups) > 1:
        more[f"factor {factor}"] = report
  return more


def equal_compute(lab: Lab, setting: Setting) -> dict[str, compare.Report]:
  """Each method against the AdamW run that costs the same, both under their own schedules."""
  full = {m: lab.config(setting, m).opt.num_train_steps for m in lab.methods}
  other = {m: o["opt.num_train_steps"] for m, o in lab.equal_compute(setting).items()}
  more = {}
  for title, lengths in (
    ("at AdamW's compute", {**other, ADAMW: full[ADAMW]}),
    ("against AdamW with twice the steps", {**full, ADAMW: other[ADAMW]}),
  ):
    chosen = [
      run
      for method, steps in lengths.items()
      for run in lab.matching(setting, _length(lab, setting, steps))
      if run.keys["opt.method"] == method
    ]
    if len({r.keys["opt.method"] for r in chosen if r.state == runs.FINISHED}) < 2:
      continue
    tune = [k for k in (*protocol.TUNED, "opt.num_train_steps") if any(k in r.keys for r in chosen)]
    more[title] = compare.compare(chosen, tune=tune)
  return more


def _length(lab: Lab, setting: Setting, steps: int) -> sweep.Overrides:
  c = lab.config(setting, ADAMW)
  warmup = round(c.opt.warmup_steps / c.opt.num_train_steps * steps)
  return {"opt.num_train_steps": steps, "opt.warmup_steps": warmup}


def section(
  lab: Lab, setting: Setting, report: compare.Report | None, extras: dict[str, compare.Report]
) -> list[str]:
  lines = [f"## {setting.label}", ""]
  if report is None:
    return [*lines, f"no finished runs yet; begin with `{command(lab, lab.stages[0])}`", ""]
  paper = paper_results.TABLES.get(lab.name, {}).get(setting.paper, {})
  lines += table(report, paper)
  if missing := [m for m in lab.methods if not report.group(m)]:
    lines += [f"no finished runs yet: {', '.join(missing)} (`{command(lab, 'rho')}`)", ""]
  for title, extra in extras.items():
    lines += [f"### {title}", "", *table(extra, {})]
  return lines + every_cell(report)


def table(report: compare.Report, paper: dict[str, float | None]) -> list[str]:
  interval = f"{CONFIDENCE:.0%} interval"
  head = ["method", "eval loss", "sd", "seeds", "minus AdamW", interval, "settings", "FLOPs"]
  if paper:
    head += ["paper", "paper minus AdamW"]
  lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
  base = report.group(ADAMW)
  for g in report.groups:
    d = g.difference
    i = d.interval if d else None
    cells = [
      g.label,
      f"{g.mean:.4f}" if math.isfinite(g.mean) else "diverged",
      "" if g.deviation is None else f"{g.deviation:.4f}",
      str(len(g.best.losses)),
      f"{d.mean:+.4f}" if d else "",
      f"{i.low:+.4f} to {i.high:+.4f}" if i else "",
      short(g.best.settings),
      f"{g.spent('compute') / base.spent('compute'):.2f}" if base else "",
    ]
    if paper:
      cells += _paper_cells(paper, g.label)
    lines.append(f"| {' | '.join(cells)} |")
  covered = {
    g.difference.interval.covers for g in report.groups if g.difference and g.difference.interval
  }
  lines += ["", *(f"The interval covers {what}." for what in sorted(covered))]
  return [*lines, *(f"- {note}" for note in report.notes), ""]


def short(settings: dict[str, Any]) -> str:
  names = {protocol.PEAK: "lr", protocol.DECAY: "wd", RHO: "rho", "opt.num_train_steps": "steps"}
  return ", ".join(f"{names[key]} {value:g}" for key, value in settings.items())


def every_cell(report: compare.Report) -> list[str]:
  """All that was tried, not only what won."""
  lines = [
    "### every setting tried",
    "",
    "| method | settings | eval loss by seed |",
    "|---|---|---|",
  ]
  for g in report.groups:
    for cell in sorted(g.cells, key=lambda c: tuple(c.settings.values())):
      losses = [f"{seed}: {loss:.4f}" for (seed, _), loss in cell.losses.items()]
      lines.append(f"| {g.label} | {short(cell.settings)} | {', '.join(losses)} |")
  return [*lines, ""]


def _paper_cells(paper: dict[str, float | None], method: str) -> list[str]:
  if method not in paper:
    return ["", ""]
  loss, base = paper[method], paper[ADAMW]
  if loss is None or base is None:
    return ["NaN", ""]
  return [f"{loss:g}", "" if method == ADAMW else f"{loss - base:+.4g}"]


def closing(lab: Lab, notes: list[str]) -> list[str]:
  """The paper's numbers where no row of ours stands for one of theirs, and what was left out."""
  lines = []
  published = paper_results.TABLES.get(lab.name, {})
  if published and not any(s.paper for s in lab.settings):
    lines += ["## The paper's losses", ""]
    methods = list(next(iter(published.values())))
    lines += [f"| size | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}"]
    for size, row in published.items():
      shown = [f"{row[m]:g}" if row[m] is not None else "NaN" for m in methods]
      lines.append(f"| {size} | {' | '.join(shown)} |")
    lines.append("")
  if figure := paper_results.FIGURES.get(lab.name):
    lines += [figure, ""]
  if notes:
    lines += ["## Runs that were left out", "", *(f"- {note}" for note in notes), ""]
  return lines


def draw(lab: Lab, reports: dict[str, compare.Report | None], folder: pathlib.Path) -> None:
  for setting in lab.settings:
    report = reports[setting.label]
    if report is None:
      continue
    suffix = "" if len(lab.settings) == 1 else "-" + setting.label.replace(" ", "")
    groups = [g for g in report.groups if math.isfinite(g.mean)]
    if lab.name == "fig1":
      series = {
        g.label: {s: r.curve("step") for s, r in sorted(g.best.runs.items())} for g in groups
      }
      plots.curves(folder / f"curves{suffix}", series, ADAMW, "steps")
    elif lab.name == "fig3":
      draw_rho(report, folder / f"rho{suffix}")
    else:
      draw_differences(lab, setting, report, folder / f"differences{suffix}")


def draw_rho(report: compare.Report, path: pathlib.Path) -> None:
  """On the seeds that all values of rho have, for every method and AdamW."""
  base = report.group(ADAMW)
  shared = (protocol.TUNING_SEED, protocol.TUNING_SEED)
  if base is None or shared not in base.best.losses:
    return
  points = {
    g.label: [
      (c.settings[RHO], c.losses[shared])
      for c in g.cells
      if RHO in c.settings and math.isfinite(c.losses.get(shared, math.inf))
    ]
    for g in report.groups
    if g is not base
  }
  points = {k: v for k, v in points.items() if v}
  if points:
    plots.loss_against_rho(path, points, base.best.losses[shared])


def draw_differences(
  lab: Lab, setting: Setting, report: compare.Report, path: pathlib.Path
) -> None:
  paper = paper_results.TABLES.get(lab.name, {}).get(setting.paper, {})
  rows = []
  for g in report.groups:
    if g.difference is None:
      continue
    i, theirs, base = g.difference.interval, paper.get(g.label), paper.get(ADAMW)
    published = theirs - base if theirs is not None and base is not None else None
    low, high = (i.low, i.high) if i else (None, None)
    rows.append(plots.Row(g.label, g.label, g.difference.mean, low, high, published))
  if rows:
    plots.differences(path, rows, CONFIDENCE)


if __name__ == "__main__":
  errors.run(main)
