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
from page import Block, Figure, Figures, Folded, Grid, Items, Section, Text

from nanosam import compare, plots, tables
from nanosam.runs import Run
from nanosam.tables import Table
from nanosam.writers import METRICS_FILE, read_metrics

RHO = "opt.rho"
TUNED = ("opt.peak_learning_rate", "opt.weight_decay", RHO, "opt.rho_schedule")
ADAMW = "adamw"
# Axis of an eval record: what it is called, and how many of that are one of the record's.
AXES = {
  "step": ("steps", 1.0),
  "compute": ("compute (FLOPs)", 1.0),
  "time": ("training time (minutes)", 1 / 60),
}
TAUS = ("logit", "func", "cross")
# What sharpness.json has, and how it is called in print.
SHARPNESS = {"lambda_max": "λmax(H)", "trace_H": "tr(H)", "trace_HG": "tr(H_G)"}


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
  runs: Sequence[Run]
  label: str = ""

  def __post_init__(self) -> None:
    tune = [k for k in TUNED if any(k in r.keys for r in self.runs)]
    self.report = compare.compare(self.runs, tune=tune, baseline=ADAMW)
    self.groups = [g for g in self.report.groups if math.isfinite(g.mean)]

  @functools.cached_property
  def records(self) -> dict[pathlib.Path, list[dict[str, Any]]]:
    """All of the runs that the figures are about, by workdir."""
    best = [run for g in self.groups for run in g.best.runs.values()]
    return {run.path: read_metrics(run.path / METRICS_FILE) for run in best}

  def curves(self, axis: str) -> dict[str, dict[Any, plots.Curve]]:
    """By method and seed, of each method's best setting."""
    factor = AXES[axis][1]
    return {
      g.label: {s: (x * factor, y) for s, r in g.best.runs.items() for x, y in [r.curve(axis)]}
      for g in self.groups
    }

  def section(self) -> Section:
    found = self.report.to_json()
    figures = [*self.curve_figures(), *self.rho_figure(), *self.pruning_figure()]
    return Section(
      f"Runs: {self.label}",
      [
        *comparison_blocks("Eval loss after the last step", found),
        Figures(figures),
        Section("Parts of the curvature over training", [Figures(self.tau_figures())]),
        Grid("Sharpness of the final solution", self.sharpness()),
        Grid("Cost, where and while the runs were made", self.cost()),
        *tried(found),
        Folded("How they were made", [Grid("How they were made", self.facts())]),
      ],
    )

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
        runs = {t: self._series(g, f"{prefix}/{t}") for t in TAUS}
        if not all(runs.values()):
          continue
        means = {t: plots.mean_curve(by_seed) for t, by_seed in runs.items()}
        figures.append(
          self.figure(
            f"{prefix}-{g.label}",
            f"tau of {g.label} over training, {what}",
            values_of("steps", means, ".4f"),
            functools.partial(plots.taus, runs=runs),
          )
        )
    return figures

  def _series(self, group: compare.Group, metric: str) -> dict[Any, plots.Curve]:
    found = {}
    for seed, run in group.best.runs.items():
      pairs = [(r["step"], r[metric]) for r in self.records[run.path] if metric in r]
      if pairs:
        x, y = np.array(pairs, float).T
        found[seed] = x, y
    return found

  def pruning_figure(self) -> list[Figure]:
    points = {g.label: pairs for g in self.groups if (pairs := pruned(g.best.runs.values()))}
    if not points:
      return []
    shares = sorted({x for pairs in points.values() for x, _ in pairs})
    rows = [
      [f"{x:g}", *(tables.number(dict(points[m]).get(x), ".4f") for m in points)] for x in shares
    ]
    return [
      self.figure(
        "pruning",
        "Eval loss after setting the smallest weights to zero, without training again",
        Table(["sparsity", *points], rows),
        functools.partial(plots.pruning, points=points),
      )
    ]

  def sharpness(self) -> Table:
    rows = []
    for g in self.groups:
      found = [s for r in g.best.runs.values() if (s := read_json(r.path / "sharpness.json"))]
      if found:
        values = [_mean(number_in(s.get(name)) for s in found) for name in SHARPNESS]
        rows.append([g.label, f"{g.mean:.4f}", *(tables.number(v, ".4g") for v in values)])
    return Table(["method", "eval loss", *SHARPNESS.values()], rows)

  def cost(self) -> Table:
    found = {g.label: self._cost(g) for g in self.groups}
    base = found.get(ADAMW)
    rows = [
      [
        *(method, f"{c.flops:.3g}", f"{c.flops / base.flops:.2f}" if base else ""),
        *(f"{c.seconds:.3g}", f"{c.seconds / base.seconds:.2f}" if base else ""),
        *(f"{c.tokens_per_second:.0f}", f"{c.minutes:.1f}"),
      ]
      for method, c in found.items()
    ]
    head = ["method", "FLOPs a step", f"to {ADAMW}", "seconds a step", f"to {ADAMW}"]
    return Table([*head, "tokens a second", "minutes in all"], rows)

  def _cost(self, group: compare.Group) -> Cost:
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
    keys = ("model.D", "model.N", "model.H", "model.L", "batch_size", "opt.num_train_steps")
    keys += ("opt.base", "model.dtype", "data.source")
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


def rho_points(report: compare.Report) -> tuple[dict[str, list[tuple[float, float]]], float]:
  """Loss at each rho, all else as in the method's best setting; and the baseline's loss.

  Every loss is over the same seeds, so that luck has no part in the shape of the curve.
  """
  base = report.group(report.baseline)
  if base is None:
    return {}, math.nan
  cells = {}
  for g in report.groups:
    rest = {k: v for k, v in g.best.settings.items() if k != RHO}
    mine = [c for c in g.cells if RHO in c.settings and c.settings | rest == c.settings]
    if len(mine) > 1:
      cells[g.label] = mine
  shared = set(base.best.losses).intersection(*(c.losses for mine in cells.values() for c in mine))
  if not shared:
    return {}, math.nan
  points = {
    label: [(c.settings[RHO], loss) for c in mine if math.isfinite(loss := c.mean(shared))]
    for label, mine in cells.items()
  }
  return {k: v for k, v in points.items() if v}, base.best.mean(shared)


def pruned(runs: Iterable[Run]) -> list[tuple[float, float]]:
  """(sparsity, eval loss), mean over those runs that were pruned."""
  losses: dict[float, list[float]] = {}
  for run in runs:
    for row in (read_json(run.path / "prune.json") or {}).get("rows", []):
      losses.setdefault(row["sparsity"], []).append(row["loss"])
  return sorted((x, statistics.fmean(y)) for x, y in losses.items())


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
  return json.loads(path.read_text()) if path.is_file() else None


def number_in(entry: Any) -> float:
  """A plain number, or one that stands with its standard error; NaN for none."""
  if isinstance(entry, Mapping):
    entry = entry.get("value")
  return math.nan if entry is None else float(entry)


def _mean(values: Iterable[float]) -> float:
  return statistics.fmean(values)


def _median(values: Sequence[float]) -> float:
  return statistics.median(values) if values else math.nan
