"""The part of a page about runs that may be compared with each other."""

import dataclasses
import functools
import io
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanosam.paper import blocks, measures, protocol
from nanosam.paper.experiments import ADAMW
from nanosam.paper.page import Figure, Figures, Folded, Grid, Section, Text
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study import comparison, figures, tables
from nanosam.study.figures import Curve
from nanosam.study.runs import Run
from nanosam.study.tables import Table

EQUAL_COST = (
  "At equal compute or time a method that costs more is earlier in its learning-rate schedule: for "
  "a fair race train it with a schedule for that budget."
)


@dataclasses.dataclass
class RunSet:
  """Runs that differ only in method, tuned keys and seeds, and how they compare."""

  name: str  # prefix of its figures' names
  label: str
  runs: Sequence[Run]
  copies: Mapping[pathlib.Path, Run]  # of a run, by its workdir; they may have taus

  def __post_init__(self) -> None:
    self.report = comparison.compare(self.runs, tune=protocol.tuned_keys(self.runs), baseline=ADAMW)
    self.groups = [g for g in self.report.groups if math.isfinite(g.mean)]

  @functools.cached_property
  def records(self) -> dict[pathlib.Path, list[dict[str, Any]]]:
    """Every record of the runs that the figures show, by workdir."""
    best = [run.path for g in self.groups for run in g.best.runs.values()]
    copies = {path: [copy.path] for path, copy in self.copies.items()}
    return {
      path: [
        r for place in (path, *copies.get(path, [])) for r in read_metrics(place / METRICS_FILE)
      ]
      for path in best
    }

  def section(self) -> Section:
    report = self.report.to_json()
    sharpness = measures.sharpness_table(measures.collect(self.groups, "sharpness"), {})
    pruned = blocks.pruning_figure(measures.collect(self.groups, "prune"), self.name)
    return Section(
      f"Runs: {self.label}",
      [
        *blocks.comparison("Eval loss after the last step", report),
        Figures([*self.curve_figures(), *self.rho_figure()]),
        Text(EQUAL_COST) if self.report.group(ADAMW) else Text(""),
        Grid("Cost, as measured while the runs were trained", self.cost()),
        Section("Parts of the curvature over training", [Figures(self.tau_figures())]),
        Section("Final models", [Grid("Sharpness", sharpness), Figures(pruned)]),
        blocks.tried(report),
        Folded("How they were trained", [Grid("How they were trained", self.facts())]),
      ],
    )

  def figure(
    self, name: str, caption: str, values: Table, draw: Callable[[io.StringIO], None]
  ) -> Figure:
    draw(buffer := io.StringIO())
    return Figure(f"{self.name}-{name}", caption, buffer.getvalue(), values)

  def curve_figures(self) -> list[Figure]:
    """Of each method's best setting."""
    found = []
    for axis in comparison.VIEWS.values():
      label = axis.label
      runs = {
        g.label: {s: run.curve(axis.key) for s, run in g.best.runs.items()} for g in self.groups
      }
      means = {method: figures.mean_curve(by_seed) for method, by_seed in runs.items()}
      found.append(
        self.figure(
          f"loss-{axis.key}",
          f"Eval loss against {label}",
          values_of(label, means, ".4f"),
          functools.partial(figures.losses, runs=runs, x_label=label),
        )
      )
      base = runs.get(ADAMW, {})
      gaps = {m: g for m, r in runs.items() if m != ADAMW and (g := figures.gap(r, base))}
      if gaps:
        found.append(
          self.figure(
            f"gap-{axis.key}",
            f"Eval loss minus {ADAMW}'s at equal {label}, paired by seed",
            values_of(label, gaps, "+.4f"),
            functools.partial(figures.gaps, runs=runs, baseline=ADAMW, x_label=label),
          )
        )
    return found

  def rho_figure(self) -> list[Figure]:
    points, baseline = blocks.rho_points(self.report)
    if not points:
      return []
    values = Table(
      ["method", "rho", "eval loss"],
      [[m, f"{x:g}", f"{y:.4f}"] for m, pairs in points.items() for x, y in sorted(pairs)],
    )
    caption = f"Eval loss against rho, on the seeds that every rho has; dashed: {ADAMW}"
    draw = functools.partial(figures.loss_against_rho, points=points, baseline=baseline)
    return [self.figure("rho", caption, values, draw)]

  def tau_figures(self) -> list[Figure]:
    found = []
    for g in self.groups:
      for prefix, what in (("tau", "along g"), ("tau_precond", "along M⁻¹g")):
        series = {
          seed: taus
          for seed, run in g.best.runs.items()
          if (taus := figures.tau_series(self.records[run.path], prefix))
        }
        if not series:
          continue
        means = {
          t: figures.mean_curve({seed: taus[t] for seed, taus in series.items()})
          for t in figures.TAU_STYLES
        }
        panel = {g.label: {t: (x, y_SxX.mean(0)) for t, (x, y_SxX) in means.items()}}
        found.append(
          self.figure(
            f"{prefix}-{g.label}",
            f"tau of {g.label} over training, {what}",
            values_of("steps", means, ".4f"),
            functools.partial(figures.taus, runs=panel),
          )
        )
    return found

  def cost(self) -> Table:
    found = {g.label: self._cost(g) for g in self.groups}
    base_flops, base_seconds, *_ = found.get(ADAMW, [math.nan] * 4)
    forms = (".3g", ".2f", ".3g", ".2f", ".0f", ".1f")
    rows = []
    for method, (flops, seconds, tokens_per_second, minutes) in found.items():
      steps = (flops, flops / base_flops, seconds, seconds / base_seconds)
      cells = zip((*steps, tokens_per_second, minutes), forms, strict=True)
      rows.append([method, *(tables.number(value, form) for value, form in cells)])
    head = ["method", "FLOPs a step", f"to {ADAMW}", "seconds a step", f"to {ADAMW}"]
    return Table([*head, "tokens a second", "minutes in all"], rows)

  def _cost(self, group: comparison.Group) -> list[float]:
    """FLOPs and seconds a step, tokens a second, minutes of a whole run."""
    runs = list(group.best.runs.values())
    records = [r for run in runs for r in self.records[run.path] if "perf/step_time" in r]
    flops = [run.evals[-1]["compute"] / run.evals[-1]["step"] for run in runs]
    speed = [
      statistics.median([r[f"perf/{name}"] for r in records]) if records else math.nan
      for name in ("step_time", "tokens_per_sec")
    ]
    return [statistics.fmean(flops), *speed, group.spent("time") / 60]

  def facts(self) -> Table:
    """What the runs share, or every value that occurs."""
    keys = "model.D model.N model.H model.L batch_size opt.num_train_steps opt.base".split()
    keys += ["model.dtype", "data.source"]
    facts = {k: {str(r.keys[k]) for r in self.runs} for k in keys}
    for name in ("parameters", "data", "eval_set", "devices", "git_commit"):
      facts[name] = {json.dumps(r.environment.get(name)) for r in self.runs}
    return Table(["what", "value"], [[k, "; ".join(sorted(v))] for k, v in facts.items()])


def values_of(x_label: str, curves: Mapping[str, Curve], form: str) -> Table:
  """The numbers of a figure, means over seeds: methods side by side where they share their x."""
  grids = [x for x, _ in curves.values()]
  means = [y_SxX.mean(0) for _, y_SxX in curves.values()]
  if all(len(x) == len(grids[0]) and np.allclose(x, grids[0]) for x in grids):
    rows = [
      [f"{x:.6g}", *(f"{y[i]:{form}}" for y in means)] for i, x in enumerate(grids[0].tolist())
    ]
    return Table([x_label, *curves], rows)
  rows = [
    [name, f"{x:.4g}", f"{y:{form}}"]
    for name, x_X, y_X in zip(curves, grids, means, strict=True)
    for x, y in zip(x_X.tolist(), y_X.tolist(), strict=True)
  ]
  return Table(["method", x_label, "value"], rows)
