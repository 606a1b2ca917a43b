"""What an experiment of scripts/reproduce.py has found: results.json, table.md and figures."""

import functools
import math
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanosam.paper import measures, page, published
from nanosam.paper.experiments import ADAMW, EXPERIMENTS, Setting
from nanosam.paper.page import Block, Figure, Figures, Folded, Grid, Items, Section, Text
from nanosam.paper.protocol import RHO, STEPS, Lab, tuned_keys
from nanosam.study import comparison, figures, runs, tables
from nanosam.study.comparison import Report
from nanosam.study.figures import Curves
from nanosam.study.tables import Table
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
    "taus": tau_means(reports) if "tau" in lab.stages else {},
    "paper": published.TABLES.get(lab.name) or published.FIGURES.get(lab.name),
    "paper_sharpness": published.SHARPNESS.get(lab.name),
    "notes": lab.found[1],
  }
  folder = lab.out / lab.name
  folder.mkdir(parents=True, exist_ok=True)
  write_json(folder / RESULTS_FILE, results)
  write_atomically(folder / "table.md", table(lab, results).encode())
  page.write_tables(folder / page.TABLES, experiment_blocks(results))
  for setting in lab.settings:
    if report := reports.get(setting.label):
      draw(lab, setting, report, folder)
  if "tau" in lab.stages:
    draw_taus(reports, folder)
  print(f"written: {folder}/{RESULTS_FILE}, table.md and figures", flush=True)


def command(lab: Lab, stage: str) -> str:
  flags = {"source": lab.source, "images": lab.images}
  source = "".join(f" --{flag}={value}" for flag, value in flags.items() if value)
  return (
    f"python scripts/reproduce.py {lab.name} --scale={lab.scale} --out={lab.out}{source} "
    f"--stage={stage}"
  )


def extra_reports(lab: Lab, setting: Setting) -> dict[str, Report]:
  """At equal compute, and for each factor that has runs."""
  more: dict[str, Report] = {}
  if "compute" in lab.stages:
    # Each method against the AdamW run that costs the same, both under their own schedules.
    full = {m: lab.config(setting, m).opt.num_train_steps for m in lab.methods}
    other = lab.equal_compute(setting)
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
  for factor in lab.factors if "factors" in lab.stages else ():
    report = lab.report(setting, lab.factor(setting, factor))
    if report and len(report.groups) > 1:
      more[f"factor {factor}"] = report
  return more


def table(lab: Lab, results: Mapping[str, Any]) -> str:
  """table.md."""
  missing = [s.label for s in lab.settings if s.label not in results["settings"]]
  start = Text(f"no finished runs yet; start with `{command(lab, lab.stages[0])}`")
  return page.to_markdown(
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
    compared = comparison_blocks(caption, report, theirs)
    if title.startswith("fig"):
      compared = [Folded(caption, compared)]
    elif name:
      compared.append(Figures(differences_figure(report, theirs, name)))
    measured = measured_blocks(results, label, stands_for.get(label, ""), name)
    more = [Folded(n, comparison_blocks(n, r)) for n, r in results["more"].get(label, {}).items()]
    found.append(Section(label, [*compared, *measured, *more, tried_block(report)]))
  if taus := results.get("taus"):
    found.append(
      Grid("Taus along the gradient, second half of training (by seed)", tau_table(taus))
    )
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
  pruned = pruning_figure(found.get("prune", {}), name) if name else []
  table = measures.sharpness_table(found.get("sharpness", {}), paper)
  return [Grid(caption, table), Figures(pruned)]


def published_table(losses: Mapping[str, Mapping[str, float | None]]) -> Table:
  methods = list(dict.fromkeys(m for row in losses.values() for m in row))
  rows = [
    [size, *(tables.number(row[m], "g", "NaN") if m in row else "" for m in methods)]
    for size, row in losses.items()
  ]
  return Table(["size", *methods], rows)


def draw(lab: Lab, setting: Setting, report: Report, folder: pathlib.Path) -> None:
  suffix = "" if len(lab.settings) == 1 else "-" + setting.label.replace(" ", "")
  drawn = {}
  if lab.name == "fig1":
    curves, gaps = figures.best_curves([g for g in report.groups if math.isfinite(g.mean)], "step")
    figures.losses(folder / f"curves{suffix}", curves, "steps", gaps)
  elif lab.name == "fig3":
    drawn["rho"] = rho_figure(report)
  else:
    paper = published.TABLES.get(lab.name, {}).get(setting.paper, {})
    drawn["differences"] = differences_figure(report.to_json(), paper)
  if "prune" in lab.measures:
    drawn["prune"] = pruning_figure(measures.collect(report.groups, "prune"))
  for name, found in drawn.items():
    for figure in found:
      figure.draw(folder / f"{name}{suffix}")


def read_taus(reports: Mapping[str, Report], prefix: str) -> dict[str, Curves]:
  return {
    label: figures.read_taus([r.path for r in report.groups[0].best.runs.values()], prefix)
    for label, report in reports.items()
  }


def tau_means(reports: Mapping[str, Report]) -> dict[str, dict[str, list[float]]]:
  """By setting and kind, for each seed: the mean over the second half of training."""
  return {
    label: {kind: y_SxX[:, x > x[-1] / 2].mean(1).tolist() for kind, (x, y_SxX) in curves.items()}
    for label, curves in read_taus(reports, "tau").items()
  }


def tau_table(means: Mapping[str, Mapping[str, list[float]]]) -> Table:
  kinds = list(figures.TAU_STYLES)
  rows = [
    [label, *(f"{np.mean(by[k]):.2f} ({', '.join(f'{v:.2f}' for v in by[k])})" for k in kinds)]
    for label, by in means.items()
  ]
  return Table(["setting", *(f"tau_{kind}" for kind in kinds)], rows)


def draw_taus(reports: Mapping[str, Report], folder: pathlib.Path) -> None:
  for prefix, name in (("tau", "taus"), ("tau_precond", "taus_precond")):
    figures.taus(folder / name, read_taus(reports, prefix))


# ---- blocks that experiments share with sets of runs ---------------------------------------------

Losses = Mapping[str, float | None]  # the paper's, by method; None where it diverged


def comparison_blocks(
  caption: str, report: Mapping[str, Any], paper: Losses | None = None
) -> list[Block]:
  """A comparison in its JSON form, with its notes."""
  return [
    Grid(caption, tables.comparison(report, paper)),
    *(Text(f"An interval covers {what}.") for what in tables.covered(report)),
    Items(report["notes"]),
  ]


def tried_block(report: Mapping[str, Any]) -> Block:
  return Folded("Every setting tried", [Grid("Every setting tried", tables.cells(report))])


def differences_figure(report: Mapping[str, Any], paper: Losses, name: str = "") -> list[Figure]:
  rows, base, baseline = [], paper.get(ADAMW), report["baseline"]
  for g in report["groups"]:
    if g["difference"] is not None:
      i, theirs = tables.interval(g), paper.get(g["label"])
      published = theirs - base if theirs is not None and base is not None else None
      low, high = (i["low"], i["high"]) if i else (None, None)
      rows.append(figures.Row(g["label"], g["difference"], low, high, published))
  kinds = ", ".join(sorted({tables.covers(g) for g in report["groups"] if tables.interval(g)}))
  caption = f"Eval loss minus {baseline}'s (nats)"
  caption += f"; lines: {tables.interval_head(report)}s over {kinds}" if kinds else ""
  values = Table(
    ["method", f"minus {baseline}", "low", "high", "paper"],
    [[r.method, *(tables.number(x, "+.4f") for x in r[1:])] for r in rows],
  )
  draw = functools.partial(figures.differences, rows=rows, baseline=baseline)
  return [Figure(f"{name}-differences", caption, values, draw)] if rows else []


def pruning_figure(found: measures.Found, name: str = "") -> list[Figure]:
  """`found`: prune.json of the final models."""
  runs = [run for members in found.values() for run in members]
  curves = figures.pruning_curves(runs)
  caption = "Eval loss (nats) after setting the smallest weights to zero, without retraining"
  caption += figures.bands(curves)
  values = values_of("sparsity", curves, ".4f")
  draw = functools.partial(figures.pruning, runs=runs)
  return [Figure(f"{name}-pruning", caption, values, draw)] if runs else []


def rho_figure(report: Report, name: str = "") -> list[Figure]:
  curves, baseline = rho_curves(report)
  caption = f"Eval loss (nats) against rho, on the seeds that every rho has; dashed: {ADAMW}"
  values = values_of("rho", curves, ".4f")
  draw = functools.partial(figures.loss_against_rho, curves=curves, baseline=baseline)
  return [Figure(f"{name}-rho", caption, values, draw)] if curves else []


def rho_curves(report: Report) -> tuple[Curves, float]:
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
  curves = {}
  for label, mine in cells.items():
    points = sorted((c.settings[RHO], c.mean(shared)) for c in mine)
    if finite := [point for point in points if math.isfinite(point[1])]:
      x, y = np.array(finite).T
      curves[label] = x, y[None]
  return curves, base.best.mean(shared)


def values_of(x_label: str, curves: Curves, form: str) -> Table:
  """The numbers of a figure, means over seeds: methods side by side where they share their x."""
  grids = [x for x, _ in curves.values()]
  means = [y_SxX.mean(0) for _, y_SxX in curves.values()]
  if all(len(x) == len(grids[0]) and np.allclose(x, grids[0]) for x in grids):
    rows = [
      [f"{x:.6g}", *(f"{y:{form}}" for y in ys)] for x, *ys in zip(*grids[:1], *means, strict=True)
    ]
    return Table([x_label, *curves], rows)
  rows = [
    [name, f"{x:.4g}", f"{y:{form}}"]
    for name, x_X, y_X in zip(curves, grids, means, strict=True)
    for x, y in zip(x_X, y_X, strict=True)
  ]
  return Table(["method", x_label, "value"], rows)
