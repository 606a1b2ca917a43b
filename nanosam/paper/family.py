"""The part of a report about one family of runs: those that may be compared with each other."""

import dataclasses
import functools
import io
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanosam.paper import measures, protocol
from nanosam.paper.findings import rho_points
from nanosam.paper.page import Block, Figure, Figures, Folded, Grid, Items, Section, Text
from nanosam.paper.protocol import ADAMW
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study import comparison, plots, tables
from nanosam.study.runs import Run
from nanosam.study.tables import Table

# Axis of an eval record: what it is called, and how many of that are one of the record's.
AXES = {
  "step": ("steps", 1.0),
  "compute": ("compute (FLOPs)", 1.0),
  "time": ("training time (minutes)", 1 / 60),
}
EQUAL_COST = (
  "At equal compute or time a method that costs more is earlier in its learning-rate schedule: for "
  "a fair race train it with a schedule for that budget."
)


class Cost(NamedTuple):
  """Of a step, and of a whole run."""

  flops: float
  seconds: float
  tokens_per_second: float
  minutes: float


@dataclasses.dataclass
class Family:
  """Runs that differ in method, tuned keys and seeds alone, and how they compare."""

  name: str  # of its figures' files
  label: str
  runs: Sequence[Run]
  twins: Mapping[pathlib.Path, Run]  # the same run elsewhere, perhaps with taus on the way

  def __post_init__(self) -> None:
    self.report = comparison.compare(self.runs, tune=protocol.tuned_keys(self.runs), baseline=ADAMW)
    self.groups = [g for g in self.report.groups if math.isfinite(g.mean)]

  @functools.cached_property
  def records(self) -> dict[pathlib.Path, list[dict[str, Any]]]:
    """All of the runs that the figures are about, by workdir."""
    best = [run.path for g in self.groups for run in g.best.runs.values()]
    return {
      path: [
        record
        for place in (path, *([self.twins[path].path] if path in self.twins else []))
        for record in read_metrics(place / METRICS_FILE)
      ]
      for path in best
    }

  def curves(self, axis: str) -> dict[str, dict[Any, plots.Curve]]:
    """By method and seed, of each method's best setting."""
    factor = AXES[axis][1]
    return {
      g.label: {s: (x * factor, y) for s, r in g.best.runs.items() for x, y in [r.curve(axis)]}
      for g in self.groups
    }

  def section(self) -> Section:
    found = self.report.to_json()
    curves = [*self.curve_figures(), *self.rho_figure()]
    pruned = pruning_figure(self.measured("prune"), self.name)
    sharpness = measures.sharpness_table(self.measured("sharpness"), {})
    return Section(
      f"Runs: {self.label}",
      [
        *comparison_blocks("Eval loss after the last step", found),
        Figures(curves),
        Text(EQUAL_COST) if self.report.group(ADAMW) else Text(""),
        Grid("Cost, where and while the runs were made", self.cost()),
        Section("Parts of the curvature over training", [Figures(self.tau_figures())]),
        Section("Final models", [Grid("Sharpness", sharpness), Figures(pruned)]),
        *tried(found),
        Folded("How they were made", [Grid("How they were made", self.facts())]),
      ],
    )

  def measured(self, what: str) -> dict[str, list[dict[str, Any]]]:
    return {
      g.label: [found for r in g.best.runs.values() if (found := measures.stored(r, what))]
      for g in self.groups
    }

  def figure(
    self, name: str, caption: str, values: Table, draw: Callable[[io.StringIO], None]
  ) -> Figure:
    draw(buffer := io.StringIO())
    return Figure(f"{self.name}-{name}", caption, buffer.getvalue(), values)

  def curve_figures(self) -> list[Figure]:
    figures = []
    for axis, (label, _) in AXES.items():
      runs = self.curves(axis)
      means = {method: plots.mean_curve(by_seed) for method, by_seed in runs.items()}
      figures.append(
        self.figure(
          f"loss-{axis}",
          f"Eval loss against {label}",
          values_of(label, means, ".4f"),
          functools.partial(plots.losses, runs=runs, x_label=label),
        )
      )
      base = runs.get(ADAMW, {})
      gaps = {m: g for m, r in runs.items() if m != ADAMW and (g := plots.gap(r, base))}
      if gaps:
        figures.append(
          self.figure(
            f"gap-{axis}",
            f"Eval loss minus {ADAMW}'s at equal {label}, paired by seed",
            values_of(label, gaps, "+.4f"),
            functools.partial(plots.gaps, runs=runs, baseline=ADAMW, x_label=label),
          )
        )
    return figures

  def rho_figure(self) -> list[Figure]:
    points, baseline = rho_points(self.report)
    if not points:
      return []
    values = Table(
      ["method", "rho", "eval loss"],
      [[m, f"{x:g}", f"{y:.4f}"] for m, pairs in points.items() for x, y in sorted(pairs)],
    )
    return [
      self.figure(
        "rho",
        f"Eval loss against rho, on the seeds that every rho has; dashed: {ADAMW}",
        values,
        functools.partial(plots.loss_against_rho, points=points, baseline=baseline),
      )
    ]

  def tau_figures(self) -> list[Figure]:
    figures = []
    for g in self.groups:
      for prefix, what in (("tau", "along g"), ("tau_precond", "along M⁻¹g")):
        by_seed = {t: self._series(g, f"{prefix}/{t}") for t in plots.TAU_STYLES}
        if not all(by_seed.values()):
          continue
        means = {t: plots.mean_curve(series) for t, series in by_seed.items()}
        panel = {g.label: {t: (x, y_SxX.mean(0)) for t, (x, y_SxX) in means.items()}}
        figures.append(
          self.figure(
            f"{prefix}-{g.label}",
            f"tau of {g.label} over training, {what}",
            values_of("steps", means, ".4f"),
            functools.partial(plots.taus, runs=panel),
          )
        )
    return figures

  def _series(self, group: comparison.Group, metric: str) -> dict[Any, plots.Curve]:
    found = {}
    for seed, run in group.best.runs.items():
      pairs = [(r["step"], r[metric]) for r in self.records[run.path] if metric in r]
      if pairs:
        x, y = np.array(pairs, float).T
        found[seed] = x, y
    return found

  def cost(self) -> Table:
    found = {g.label: self._cost(g) for g in self.groups}
    nothing = Cost(math.nan, math.nan, math.nan, math.nan)
    base, number = found.get(ADAMW, nothing), tables.number
    rows = [
      [
        *(method, number(c.flops, ".3g"), number(c.flops / base.flops, ".2f")),
        *(number(c.seconds, ".3g"), number(c.seconds / base.seconds, ".2f")),
        *(number(c.tokens_per_second, ".0f"), number(c.minutes, ".1f")),
      ]
      for method, c in found.items()
    ]
    head = ["method", "FLOPs a step", f"to {ADAMW}", "seconds a step", f"to {ADAMW}"]
    return Table([*head, "tokens a second", "minutes in all"], rows)

  def _cost(self, group: comparison.Group) -> Cost:
    runs = list(group.best.runs.values())
    records = [r for run in runs for r in self.records[run.path] if "perf/step_time" in r]
    last = [run.evals[-1] for run in runs]
    return Cost(
      flops=_mean(r["compute"] / r["step"] for r in last),
      seconds=_median([r["perf/step_time"] for r in records]),
      tokens_per_second=_median([r["perf/tokens_per_sec"] for r in records]),
      minutes=_mean(r["time"] for r in last) / 60,
    )

  def facts(self) -> Table:
    """What the runs share, or all that they have of it."""
    keys = "model.D model.N model.H model.L batch_size opt.num_train_steps opt.base".split()
    keys += ["model.dtype", "data.source"]
    facts = {k: {str(r.keys[k]) for r in self.runs} for k in keys}
    for name in ("parameters", "data", "eval_set", "devices", "git_commit"):
      facts[name] = {json.dumps(r.environment.get(name)) for r in self.runs}
    return Table(["what", "value"], [[k, "; ".join(sorted(v))] for k, v in facts.items()])


def comparison_blocks(
  caption: str, report: Mapping[str, Any], paper: Mapping[str, float | None] | None = None
) -> list[Block]:
  """A comparison in its JSON form, with what is to be said about it."""
  return [
    Grid(caption, tables.comparison(report, paper)),
    *(Text(f"The interval covers {what}.") for what in tables.covered(report)),
    Items(report["notes"]),
  ]


def tried(report: Mapping[str, Any]) -> list[Block]:
  return [Folded("Every setting tried", [Grid("Every setting tried", tables.cells(report))])]


def values_of(
  x_label: str, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], form: str
) -> Table:
  """The numbers of a figure: methods side by side where they share their x."""
  grids = [x for x, _ in curves.values()]
  if all(len(x) == len(grids[0]) and np.allclose(x, grids[0]) for x in grids):
    means = [y_SxX.mean(0) for _, y_SxX in curves.values()]
    rows = [
      [f"{x:.6g}", *(f"{y[i]:{form}}" for y in means)] for i, x in enumerate(grids[0].tolist())
    ]
    return Table([x_label, *curves], rows)
  rows = [
    [name, f"{x:.4g}", f"{y:{form}}"]
    for name, (x_X, y_SxX) in curves.items()
    for x, y in zip(x_X.tolist(), y_SxX.mean(0).tolist(), strict=True)
  ]
  return Table(["method", x_label, "value"], rows)


def pruning_figure(found: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[Figure]:
  """`found`: prune.json of the final models, by method."""
  members = {method: runs for method, runs in found.items() if runs}
  if not members:
    return []
  plots.pruning(buffer := io.StringIO(), [run for runs in members.values() for run in runs])
  losses: dict[float, dict[str, list[float]]] = {}
  for method, runs in members.items():
    for point in (p for run in runs for p in run["points"]):
      losses.setdefault(point["sparsity"], {}).setdefault(method, []).append(point["loss"])
  rows = [
    [f"{x:g}", *(f"{_mean(y[m]):.4f}" if m in y else "" for m in members)]
    for x, y in sorted(losses.items())
  ]
  caption = "Eval loss after setting the smallest weights to zero, without training again"
  values = Table(["sparsity", *members], rows)
  return [Figure(f"{name}-pruning", caption, buffer.getvalue(), values)]


def _mean(values: Iterable[float]) -> float:
  return statistics.fmean(values)


def _median(values: Sequence[float]) -> float:
  return statistics.median(values) if values else math.nan
