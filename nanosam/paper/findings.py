"""What an experiment of scripts/reproduce.py has found: results.json, table.md and figures."""

import math
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from nanosam.paper import blocks, measures, published
from nanosam.paper.experiments import ADAMW, EXPERIMENTS, Setting
from nanosam.paper.page import Block, Figures, Folded, Grid, Items, Section, Text, to_markdown
from nanosam.paper.protocol import STEPS, Lab, tuned_keys
from nanosam.study import comparison, figures, runs, tables
from nanosam.study.comparison import Report
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically, write_json

RESULTS_FILE = "results.json"


def write_report(lab: Lab, argv: list[str]) -> None:
  reports = {s.label: report for s in lab.settings if (report := lab.report(s))}
  if not reports:
    start = command(lab, lab.stages[0])
    raise UserError(f"{lab.name} has no finished runs in {lab.folder} yet; start with: {start}")
  for report in reports.values():
    if missing := [m for m in lab.methods if not report.group(m)]:
      report.notes.append(f"no finished runs yet: {', '.join(missing)} (`{command(lab, 'rho')}`)")
  results = {
    "experiment": lab.name,
    "scale": lab.scale,
    "command": argv,
    "settings": {label: r.to_json() for label, r in reports.items()},
    "more": {
      s.label: {n: r.to_json() for n, r in extra_reports(lab, s).items()} for s in lab.settings
    },
    "measured": {
      label: {what: measures.collect(r.groups, what) for what in lab.measures}
      for label, r in reports.items()
    },
    "paper": published.TABLES.get(lab.name) or published.FIGURES.get(lab.name),
    "paper_sharpness": published.SHARPNESS.get(lab.name),
    "notes": lab.found[1],
  }
  folder = lab.out / lab.name
  folder.mkdir(parents=True, exist_ok=True)
  write_json(folder / RESULTS_FILE, results)
  write_atomically(folder / "table.md", table(lab, results).encode())
  for setting in lab.settings:
    if report := reports.get(setting.label):
      draw(lab, setting, report, folder)
  if "tau" in lab.stages:
    draw_taus(reports, folder)
  print(f"written: {folder}/{RESULTS_FILE}, table.md and figures", flush=True)


def command(lab: Lab, stage: str) -> str:
  source = f" --source={lab.source}" if lab.source else ""
  return (
    f"python scripts/reproduce.py {lab.name} --scale={lab.scale} --out={lab.out}{source} "
    f"--stage={stage}"
  )


def extra_reports(lab: Lab, setting: Setting) -> dict[str, Report]:
  """At equal compute, and for each factor that has runs."""
  more: dict[str, Report] = {}
  if "compute" in lab.stages:
    more |= equal_compute(lab, setting)
  if "factors" in lab.stages:
    for factor in lab.factors:
      report = lab.report(setting, lab.factor(setting, factor))
      if report and len(report.groups) > 1:
        more[f"factor {factor}"] = report
  return more


def equal_compute(lab: Lab, setting: Setting) -> dict[str, Report]:
  """Each method against the AdamW run that costs the same, both under their own schedules."""
  full = {m: lab.config(setting, m).opt.num_train_steps for m in lab.methods}
  other = lab.equal_compute(setting)
  more = {}
  for title, lengths in (
    ("at AdamW's compute", {**other, ADAMW: full[ADAMW]}),
    ("against AdamW with twice the steps", {**full, ADAMW: other[ADAMW]}),
  ):
    chosen = [
      run
      for method, steps in lengths.items()
      for run in lab.matching(setting, lab.length(setting, steps))
      if run.keys["opt.method"] == method
    ]
    if len({r.keys["opt.method"] for r in chosen if r.state == runs.FINISHED}) > 1:
      more[title] = comparison.compare(chosen, tune=[*tuned_keys(chosen), STEPS])
  return more


def table(lab: Lab, results: Mapping[str, Any]) -> str:
  """table.md."""
  missing = [s.label for s in lab.settings if s.label not in results["settings"]]
  start = Text(f"no finished runs yet; start with `{command(lab, lab.stages[0])}`")
  return to_markdown(
    f"{lab.name}, {lab.scale}",
    [
      Text(f"`python {shlex.join(results['command'])}`"),
      *experiment_blocks(results),
      *(Section(label, [start]) for label in missing),
      Section("Runs that were left out", [Items(results["notes"])]),
    ],
  )


def experiment_blocks(results: Mapping[str, Any], prefix: str = "") -> list[Block]:
  """An experiment, from its results.json; with a prefix for their names, its figures too."""
  title, scale, paper = results["experiment"], results["scale"], results["paper"]
  stands_for = {s.label: s.paper for s in EXPERIMENTS[title].settings[scale]}
  losses = paper if isinstance(paper, dict) else {}
  found: list[Block] = [Text(paper)] if isinstance(paper, str) else []
  for number, (label, report) in enumerate(results["settings"].items()):
    theirs = losses.get(stands_for.get(label, ""), {})
    name = f"{prefix}-{number}" if prefix else ""
    caption = "Eval loss" + (f", beside the paper's ({stands_for[label]})" if theirs else "")
    compared = blocks.comparison(caption, report, theirs)
    if title.startswith("fig"):
      compared = [Folded(caption, compared)]
    elif name:
      compared.append(Figures(blocks.differences_figure(report, theirs, name)))
    measured = measured_blocks(results, label, stands_for.get(label, ""), name)
    more = [Folded(n, blocks.comparison(n, r)) for n, r in results["more"].get(label, {}).items()]
    found.append(Section(label, [*compared, *measured, *more, blocks.tried(report)]))
  if losses and not any(stands_for.values()):
    found.append(Grid("The paper's losses", published_table(losses)))
  return found


def measured_blocks(
  results: Mapping[str, Any], label: str, stands_for: str, name: str
) -> list[Block]:
  """Of final models; the paper's numbers are from its own scale."""
  found = results.get("measured", {}).get(label, {})
  paper = (results.get("paper_sharpness") or {}).get(stands_for, {})
  caption = "Sharpness of the final models" + (", in brackets the paper's" if paper else "")
  pruned = blocks.pruning_figure(found.get("prune", {}), name) if name else []
  table = measures.sharpness_table(found.get("sharpness", {}), paper)
  return [Grid(caption, table), Figures(pruned)]


def published_table(losses: Mapping[str, Mapping[str, float | None]]) -> tables.Table:
  methods = list(dict.fromkeys(m for row in losses.values() for m in row))
  rows = [
    [size, *(tables.number(row[m], "g", "NaN") if m in row else "" for m in methods)]
    for size, row in losses.items()
  ]
  return tables.Table(["size", *methods], rows)


def draw(lab: Lab, setting: Setting, report: Report, folder: pathlib.Path) -> None:
  suffix = "" if len(lab.settings) == 1 else "-" + setting.label.replace(" ", "")
  drawn = {}
  if lab.name == "fig1":
    curves, gaps = figures.best_curves([g for g in report.groups if math.isfinite(g.mean)], "step")
    figures.losses(folder / f"curves{suffix}", curves, "steps", gaps)
  elif lab.name == "fig3":
    drawn["rho"] = blocks.rho_figure(report)
  else:
    paper = published.TABLES.get(lab.name, {}).get(setting.paper, {})
    drawn["differences"] = blocks.differences_figure(report.to_json(), paper)
  if "prune" in lab.measures:
    drawn["prune"] = blocks.pruning_figure(measures.collect(report.groups, "prune"))
  for name, found in drawn.items():
    for figure in found:
      figure.draw(folder / f"{name}{suffix}")


def draw_taus(reports: Mapping[str, Report], folder: pathlib.Path) -> None:
  for prefix, name in (("tau", "taus"), ("tau_precond", "taus_precond")):
    panels = {}
    for label, report in reports.items():
      first = next(iter(report.groups[0].best.runs.values()))
      panels[label] = figures.read_taus(first.path, prefix)
    figures.taus(folder / name, panels)
