"""What an experiment of scripts/reproduce.py has found: results.json, table.md and figures."""

import math
import pathlib
import shlex
from typing import Any

from nanosam.paper import measures, protocol, published
from nanosam.paper.protocol import ADAMW, RHO, Lab, Setting
from nanosam.study import comparison, plots, runs, sweep, tables
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically, write_json

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
    "paper": published.TABLES.get(lab.name) or published.FIGURES.get(lab.name),
    "paper_sharpness": published.SHARPNESS.get(lab.name),
    "notes": notes,
  }
  write_json(folder / "results.json", results)
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


def extra_reports(lab: Lab, setting: Setting) -> dict[str, comparison.Report]:
  """Equal compute, and a report for each factor that has runs."""
  more: dict[str, comparison.Report] = {}
  if "compute" in lab.stages:
    more |= equal_compute(lab, setting)
  if "factors" in lab.stages:
    for factor in lab.factors:
      report = lab.report(setting, lab.factor(setting, factor))
      if report and len(report.groups) > 1:
        more[f"factor {factor}"] = report
  return more


def equal_compute(lab: Lab, setting: Setting) -> dict[str, comparison.Report]:
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
    tune = [*protocol.tuned_keys(chosen), "opt.num_train_steps"]
    more[title] = comparison.compare(chosen, tune=tune)
  return more


def _length(lab: Lab, setting: Setting, steps: int) -> sweep.Overrides:
  c = lab.config(setting, ADAMW)
  warmup = round(c.opt.warmup_steps / c.opt.num_train_steps * steps)
  return {"opt.num_train_steps": steps, "opt.warmup_steps": warmup}


def section(
  lab: Lab, setting: Setting, report: comparison.Report | None, extras: dict[str, comparison.Report]
) -> list[str]:
  lines = [f"## {setting.label}", ""]
  if report is None:
    return [*lines, f"no finished runs yet; begin with `{command(lab, lab.stages[0])}`", ""]
  paper = published.TABLES.get(lab.name, {}).get(setting.paper, {})
  lines += [*table(report.to_json(), paper), *measures.section(lab, setting, report)]
  if missing := [m for m in lab.methods if not report.group(m)]:
    lines += [f"no finished runs yet: {', '.join(missing)} (`{command(lab, 'rho')}`)", ""]
  for title, extra in extras.items():
    lines += [f"### {title}", "", *table(extra.to_json(), {})]
  tried = tables.markdown(tables.cells(report.to_json()))
  return [*lines, "### every setting tried", "", *tried]


def table(report: dict[str, Any], paper: dict[str, float | None]) -> list[str]:
  covered = [f"The interval covers {what}." for what in tables.covered(report)]
  notes = [f"- {note}" for note in report["notes"]]
  return [*tables.markdown(tables.comparison(report, paper)), *covered, *notes, ""]


def closing(lab: Lab, notes: list[str]) -> list[str]:
  """The paper's numbers where no row of ours stands for one of theirs, and what was left out."""
  lines = []
  losses = published.TABLES.get(lab.name, {})
  if losses and not any(s.paper for s in lab.settings):
    lines += ["## The paper's losses", "", *tables.markdown(published_table(losses))]
  if figure := published.FIGURES.get(lab.name):
    lines += [figure, ""]
  if notes:
    lines += ["## Runs that were left out", "", *(f"- {note}" for note in notes), ""]
  return lines


def published_table(published: dict[str, dict[str, float | None]]) -> tables.Table:
  methods = list(dict.fromkeys(m for row in published.values() for m in row))
  rows = [
    [size, *(tables.number(row[m], "g", "NaN") if m in row else "" for m in methods)]
    for size, row in published.items()
  ]
  return tables.Table(["size", *methods], rows)


def draw(lab: Lab, reports: dict[str, comparison.Report | None], folder: pathlib.Path) -> None:
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


def draw_rho(report: comparison.Report, path: pathlib.Path) -> None:
  points, baseline = rho_points(report)
  if points:
    plots.loss_against_rho(path, points, baseline)


def rho_points(report: comparison.Report) -> tuple[dict[str, list[tuple[float, float]]], float]:
  """Loss at each rho, all else as in the method's best setting; and the baseline's loss.

  Every loss is over the same seeds, so that luck has no part in the shape of the curve.
  """
  base = report.group(report.baseline)
  cells = {}
  for g in report.groups:
    rest = {k: v for k, v in g.best.settings.items() if k != RHO}
    mine = [c for c in g.cells if RHO in c.settings and c.settings | rest == c.settings]
    if len(mine) > 1:
      cells[g.label] = mine
  every = [c.losses for mine in cells.values() for c in mine]
  shared = set(base.best.losses).intersection(*every) if base else set()
  if base is None or not shared:
    return {}, math.nan
  points = {
    label: [(c.settings[RHO], loss) for c in mine if math.isfinite(loss := c.mean(shared))]
    for label, mine in cells.items()
  }
  return {k: v for k, v in points.items() if v}, base.best.mean(shared)


def draw_differences(
  lab: Lab, setting: Setting, report: comparison.Report, path: pathlib.Path
) -> None:
  paper = published.TABLES.get(lab.name, {}).get(setting.paper, {})
  if rows := difference_rows(report.to_json(), paper):
    plots.differences(path, rows, CONFIDENCE)


def difference_rows(report: dict[str, Any], paper: dict[str, float | None]) -> list[plots.Row]:
  rows = []
  for g in report["groups"]:
    if g["difference"] is None:
      continue
    i, theirs, base = tables.interval(g), paper.get(g["label"]), paper.get(ADAMW)
    published = theirs - base if theirs is not None and base is not None else None
    low, high = (i["low"], i["high"]) if i else (None, None)
    rows.append(plots.Row(g["label"], g["difference"], low, high, published))
  return rows
