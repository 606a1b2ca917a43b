"""The part of a page about runs that may be compared with each other."""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanosam.paper import blocks, measures, protocol
from nanosam.paper.experiments import ADAMW
from nanosam.paper.page import Figure, Figures, Folded, Grid, Section, Text
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study import comparison, figures, tables
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
        Figures([*self.curve_figures(), *blocks.rho_figure(self.report, self.name)]),
        Text(EQUAL_COST) if self.report.group(ADAMW) else Text(""),
        Grid("Cost, as measured while the runs were trained", self.cost()),
        Section("Parts of the curvature over training", [Figures([*self.tau_figures()])]),
        Section("Final models", [Grid("Sharpness", sharpness), Figures(pruned)]),
        blocks.tried(report),
        Folded("How they were trained", [Grid("How they were trained", self.facts())]),
      ],
    )

  def curve_figures(self) -> Iterator[Figure]:
    """Of each method's best setting."""
    for axis in comparison.VIEWS.values():
      losses, gaps = figures.best_curves(self.groups, axis.key)
      yield Figure(
        f"{self.name}-loss-{axis.key}",
        f"Eval loss against {axis.label}",
        blocks.values_of(axis.label, losses, ".4f"),
        functools.partial(figures.losses, curves=losses, x_label=axis.label),
      )
      if gaps:
        yield Figure(
          f"{self.name}-gap-{axis.key}",
          f"Eval loss minus {ADAMW}'s at equal {axis.label}, paired by seed",
          blocks.values_of(axis.label, gaps, "+.4f"),
          functools.partial(figures.gaps, curves=gaps, x_label=axis.label),
        )

  def tau_figures(self) -> Iterator[Figure]:
    for g in self.groups:
      records = [self.records[run.path] for run in g.best.runs.values()]
      for prefix, what in (("tau", "along g"), ("tau_precond", "along M⁻¹g")):
        if curves := figures.tau_curves(records, prefix):
          yield Figure(
            f"{self.name}-{prefix}-{g.label}",
            f"tau of {g.label} over training, {what}",
            blocks.values_of("steps", curves, ".4f"),
            functools.partial(figures.taus, runs={g.label: curves}),
          )

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
