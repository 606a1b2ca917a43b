"""What an experiment of scripts/reproduce.py has found: results.json, table.md and figures."""

import json
import math
import pathlib
import shlex
from typing import Any

import measures
import paper_results
import protocol
from protocol import ADAMW, RHO, Lab, Setting

from nanosam import compare, plots, runs, sweep
from nanosam.errors import UserError
from nanosam.workdir import write_atomically

CONFIDENCE = 0.95


def write_report(lab: Lab, argv: list[str]) -> None:
  notes = lab.found[1]
  reports = {s.label: lab.report(s) for s in lab.settings}
  if not any(reports.values()):
    raise UserError(
      f"{lab.name} has no finished runs in {lab.folder} yet; begin with: "
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
    "measured": {s.label: measures.collect(lab, reports[s.label]) for s in lab.settings},
    "paper": paper_results.TABLES.get(lab.name) or paper_results.FIGURES.get(lab.name),
    "paper_sharpness": paper_results.SHARPNESS.get(lab.name),
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
  lines += [*table(report, paper), *measures.section(lab, setting, report)]
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
  measures.draw(lab, reports, folder)
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
