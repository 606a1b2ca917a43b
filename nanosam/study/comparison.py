"""Paired comparison of runs by their eval loss.

Runs that agree in the --by keys are a group. Within a group, runs that agree in the --tune keys
are a cell; its runs differ only by seed. The best cell of each group, judged on the seeds that all
its cells have, is compared with the baseline's best cell, run by run: only runs with the same seed
and data_seed are paired, which removes the luck that both share from the difference.

Three intervals, each by Student's t (see nanosam/study/paired.py):
  both    other seeds, data orders and eval text: the one to quote, given two or more pairs
  seeds   other seeds and data orders, on this eval set
  units   other eval text, for these very runs; all there is with one pair, and it says nothing
          about seeds
No interval covers the choice of the best cell: a seed that was used for tuning flatters its group.

Groups by data.weights are of one store, and the compute of a run includes its proxy's and that of
the scoring: at equal steps the report says what they add, at equal compute they count.

Views: the loss after the last step; or at the largest compute (or training time) that all runs
reached, read off the eval curves. A curve read before its end is in mid-schedule, where the
learning rate is still high: for a fair race train with a schedule for that budget.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanosam import config as config_lib
from nanosam.study import paired, tables
from nanosam.study.comparable import check_comparable
from nanosam.study.runs import AXES, DIVERGED, FINISHED, Run
from nanosam.system.errors import UsageError, UserError

ADAMW = "adamw"  # the usual baseline
CONFIDENCE = 0.95
_EQUAL = 0.02  # by how much the compute of runs may differ that count as equal
VIEWS = {name: axis for name, axis in AXES.items() if name != "tokens"}  # tokens go with steps


@dataclasses.dataclass
class Cell:
  """Runs of one setting: they differ only by seed."""

  settings: dict[str, Any]  # of the tuned keys
  losses: dict[tuple[int, int], float]  # by (seed, data_seed); inf where the run diverged
  runs: dict[tuple[int, int], Run]  # the finished ones

  def mean(self, replicates: Iterable[tuple[int, int]] = ()) -> float:
    return float(np.mean([self.losses[r] for r in list(replicates) or self.losses]))


@dataclasses.dataclass
class Difference:
  """To the baseline; negative is better."""

  mean: float
  pairs: int
  deviation: float  # over pairs
  intervals: dict[str, paired.Interval]


@dataclasses.dataclass
class Group:
  label: str
  keys: dict[str, Any]
  cells: list[Cell]
  best: Cell
  difference: Difference | None = None
  to_target: float | None = None  # where the curve, averaged over seeds, reaches it; None: nowhere
  warnings: list[str] = dataclasses.field(default_factory=list)  # a few words each

  @property
  def mean(self) -> float:
    return self.best.mean()

  @property
  def deviation(self) -> float | None:
    """Standard deviation over seeds."""
    losses = list(self.best.losses.values())
    several = len(losses) > 1 and math.isfinite(sum(losses))
    return float(np.std(losses, ddof=1)) if several else None

  def spent(self, name: str) -> float:
    """Tokens, compute or time of a whole run, averaged over seeds."""
    spent = [r.evals[-1].get(name, math.nan) for r in self.best.runs.values()]
    return float(np.mean(spent)) if spent else math.nan


@dataclasses.dataclass
class Report:
  view: str
  baseline: str
  budget: float | None  # where the curves are read, on the view's axis; None: at their ends
  target: float | None
  groups: list[Group]
  notes: list[str]
  confidence: float = CONFIDENCE

  def group(self, label: str) -> Group | None:
    return next((g for g in self.groups if g.label == label), None)

  def to_json(self) -> dict[str, Any]:
    return {
      **{k: getattr(self, k) for k in ("view", "baseline", "budget", "target", "notes")},
      "confidence": self.confidence,
      "groups": [_group_json(g) for g in self.groups],
    }


def compare(
  runs: Sequence[Run],
  *,
  by: Sequence[str] = ("opt.method",),
  tune: Sequence[str] = (),
  baseline: str = ADAMW,
  view: str = "steps",
  target: float | None = None,
  confidence: float = CONFIDENCE,
) -> Report:
  """Refuses (UsageError) runs that differ in more than `by`, `tune` and their seeds."""
  axis = config_lib.lookup("view", view, VIEWS).key
  runs = [r for r in runs if r.state in (FINISHED, DIVERGED)]
  finished = [r for r in runs if r.state == FINISHED]
  if not finished:
    raise UserError(
      "no finished run to compare: train some first, for example with launch/sweep.py"
    )
  check_comparable(runs, {*by, *tune})
  for run in finished:
    if any(axis not in r for r in run.evals):
      raise UserError(f"{run.path} has evaluations without '{axis}': use another --view")
  budget = None if view == "steps" else min(r.evals[-1][axis] for r in finished)
  notes = _environment_notes(finished)
  if budget is not None:
    notes += _schedule_notes(finished, view, budget)
  groups = [
    _group(label, members, by, tune, axis, budget) for label, members in _split(runs, by).items()
  ]
  baseline = _resolve(baseline, groups)
  groups.sort(key=lambda g: (g.label != baseline, g.mean))
  for group in groups:
    notes += _tuning_notes(group, tune)
  notes += _cost_notes(finished, groups, baseline, budget is None)
  if flattered := [g for g in groups if len(g.cells) > 1]:
    for group in flattered:
      group.warnings.append("tuned on a seed shown")
    labels = ", ".join(g.label for g in flattered)
    notes.append(f"the mean includes the seed that was tuned on: {labels}")
  report = Report(view, baseline, budget, target, groups, notes, confidence)
  if base := report.group(baseline):
    notes += _seed_notes(groups)
    report.target = base.mean if target is None else target
    for group in groups:
      if group is not base:
        group.difference = difference(group.best, base.best, confidence, sequences=budget is None)
        if group.difference is None and group.best.runs:
          notes.append(
            f"{group.label} and {baseline} share no seed, or not all of those finished: no paired "
            "difference"
          )
  else:
    labels = ", ".join(g.label for g in groups)
    notes.append(f"there is no baseline '{baseline}' among {labels}: no differences")
  if report.target is not None:
    for group in groups:
      group.to_target = _to_target(group.best, axis, report.target)
  return report


def _split(runs: Iterable[Run], keys: Sequence[str]) -> dict[str, list[Run]]:
  """By label: short, unless two values would then look alike."""
  parts: dict[tuple[Any, ...], list[Run]] = collections.defaultdict(list)
  for run in runs:
    parts[tuple(run.keys.get(k) for k in keys)].append(run)
  labels = {values: ", ".join(_labels(values)) for values in parts}
  alike = [label for label, n in collections.Counter(labels.values()).items() if n > 1]
  labels |= {v: ", ".join(map(str, v)) for v, label in labels.items() if label in alike}
  return {labels[values]: members for values, members in parts.items()}


def _labels(values: Iterable[Any]) -> list[str]:
  """Without the keys that a method does not have: adamw has no rho."""
  return [tables.show(value) for value in values if value is not None] or ["none"]


def _resolve(baseline: str, groups: Sequence[Group]) -> str:
  """The label of the baseline: also by a part of it ("adamw" of "adamw, 0.1"), if one has that."""
  baseline = baseline.replace(", None", "")  # labels had that for keys that a method does not have
  if any(g.label == baseline for g in groups):
    return baseline
  found = [g.label for g in groups if baseline in map(tables.show, g.keys.values())]
  if len(found) > 1:
    raise UsageError(
      f"--baseline={baseline} is {len(found)} groups: choose one, such as --baseline='{found[0]}'"
    )
  return found[0] if found else baseline


def _group(
  label: str,
  members: list[Run],
  by: Sequence[str],
  tune: Sequence[str],
  axis: str,
  budget: float | None,
) -> Group:
  def loss(run: Run) -> float:
    if run.state == DIVERGED:
      return math.inf
    x, y = run.curve(axis)
    return float(y[-1] if budget is None else np.interp(budget, x, y))

  cells = []
  for runs in _split(members, tune).values():
    cell = Cell({k: runs[0].keys[k] for k in tune if k in runs[0].keys}, {}, {})
    for run in sorted(runs, key=lambda r: r.replicate):
      if run.replicate in cell.losses:  # they differ in what is not compared, like eval_every_steps
        same = " and ".join(str(r.path) for r in runs if r.replicate == run.replicate)
        raise UsageError(
          f"{same} have the same settings, seed and data_seed: only one of them can count; leave "
          "the other out"
        )
      cell.losses[run.replicate] = loss(run)
      if run.state == FINISHED:
        cell.runs[run.replicate] = run
    cells.append(cell)
  shared = set.intersection(*(set(c.losses) for c in cells))
  best = min(cells, key=lambda c: c.mean(shared))
  return Group(label, {k: members[0].keys.get(k) for k in by}, cells, best)


def difference(
  cell: Cell, base: Cell, confidence: float, sequences: bool = True
) -> Difference | None:
  """Between runs that share their seeds; None if there are none, or if one diverged, since a mean
  over the survivors would flatter. `sequences`: intervals over eval text too."""
  common = [r for r in cell.losses if r in base.losses]
  if not common or not all(r in cell.runs and r in base.runs for r in common):
    return None
  delta_S = np.array([cell.losses[r] - base.losses[r] for r in common])
  found = {"seeds": paired.over_seeds(delta_S, confidence)}
  if sequences:
    first = base.runs[common[0]]
    documents = first.environment.get("eval_set", {}).get("documents")
    x_SxU = paired.units(
      np.stack([cell.runs[r].nll_R - base.runs[r].nll_R for r in common]), first.weight_R, documents
    )
    found["units"] = paired.over_units(x_SxU, confidence)
    found["both"] = paired.over_both(x_SxU, confidence)
  intervals = {name: interval for name, interval in found.items() if interval}
  deviation = float(delta_S.std(ddof=1)) if len(common) > 1 else math.nan
  return Difference(float(delta_S.mean()), len(common), deviation, intervals)


def _to_target(cell: Cell, axis: str, target: float) -> float | None:
  """Where the curve, averaged over seeds, first reaches the target; interpolated."""
  curves = [run.curve(axis) for run in cell.runs.values()]
  if len(curves) < len(cell.losses) or len({len(x) for x, _ in curves}) > 1:
    return None  # one diverged, or they were not evaluated at the same steps
  x, y = np.mean(curves, axis=0)
  below = np.flatnonzero(y <= target)
  if not len(below):
    return None
  around = [below[0], max(below[0] - 1, 0)]
  return float(np.interp(target, y[around], x[around]))


def _tuning_notes(group: Group, tune: Sequence[str]) -> list[str]:
  notes = []
  for key in tune:
    tried = sorted({c.settings[key] for c in group.cells if key in c.settings})
    best = group.best.settings.get(key)
    if len(tried) < 2 or isinstance(best, str):
      continue
    for edge, word in ((tried[0], "smallest"), (tried[-1], "largest")):
      if best == edge:
        group.warnings.append(f"{key.split('.')[-1]} at the edge of its grid")
        notes.append(
          f"warning: {group.label}: the best {key}={tables.show(best)} is the {word} tried "
          f"({', '.join(map(tables.show, tried))}): the optimum may lie beyond; extend the grid"
        )
  seeds = [set(c.losses) for c in group.cells]
  if len(seeds) > 1 and not set.intersection(*seeds):
    group.warnings.append("tuned on unlike seeds")
    notes.append(f"warning: {group.label}: its settings share no seed, so tuning is partly luck")
  for cell in group.cells:
    if bad := [str(seed) for (seed, _), loss in cell.losses.items() if not math.isfinite(loss)]:
      if cell is group.best:
        group.warnings.append(f"diverged on seed {', '.join(bad)}")
      where = ", ".join(f"{k}={tables.show(v)}" for k, v in cell.settings.items())
      notes.append(f"{group.label}: {where or 'its run'} diverged on seed {', '.join(bad)}")
  return notes


def _seed_notes(groups: Sequence[Group]) -> list[str]:
  every, notes = set().union(*(g.best.losses for g in groups)), []
  for g in groups:
    if missing := ", ".join(map(str, sorted(every - set(g.best.losses)))):
      g.warnings.append("missing seeds")
      notes.append(
        f"missing seeds: {g.label} has no run with (seed, data_seed) {missing}; others do"
      )
  return notes


def _schedule_notes(runs: Sequence[Run], view: str, budget: float) -> list[str]:
  axis, notes = VIEWS[view].key, []
  early = [r for r in runs if r.evals[-1][axis] > 1.02 * budget]
  if early:
    notes.append(
      f"warning: {len(early)} of {len(runs)} runs are read before their end, in mid-schedule"
    )
  if any(r.evals[0][axis] > budget for r in runs):
    notes.append(f"warning: some runs have no evaluation within the {view} that all reached")
  return notes


def _cost_notes(
  runs: Sequence[Run], groups: Sequence[Group], baseline: str, at_end: bool
) -> list[str]:
  """What weights of documents cost, where runs are compared at equal steps; and whether runs of
  different lengths are at equal compute."""
  base = next((g for g in groups if g.label == baseline), None)
  if not at_end or base is None or not any(r.before for r in runs):
    return []
  notes = []
  for group in groups:
    ratio = group.spent("compute") / base.spent("compute")
    lengths = {r.steps for g in (group, base) for r in g.best.runs.values()}
    before = max((r.before for r in group.best.runs.values()), default=0.0)
    if len(lengths) > 1 and abs(ratio - 1) > _EQUAL:
      notes.append(
        f"warning: {group.label} and {baseline} have neither equal steps nor equal compute (ratio "
        f"{ratio:.3f}, proxy and scoring included)"
      )
    elif len(lengths) == 1 and before:
      notes.append(
        f"{group.label} has spent {before:.3g} FLOPs more than its steps, on its proxy and on "
        f"scoring: {before / (group.spent('compute') - before):.0%} of them"
      )
  return notes


def _environment_notes(runs: Sequence[Run]) -> list[str]:
  notes = [
    f"warning: until step {change['step']} {run.path} was trained with other settings "
    f"({'; '.join(change['keys'])})"
    for run in runs
    for change in run.environment.get("changes", [])
    if change["keys"]
  ]
  notes += [f"{run.path} started from {run.lineage}" for run in runs if run.lineage]
  for name in ("git_commit", "packages", "devices"):
    found = {json.dumps(r.environment.get(name), sort_keys=True) for r in runs}
    if len(found) > 1:
      notes.append(f"warning: the runs were trained with {len(found)} different {name}")
  return notes


def _group_json(g: Group) -> dict[str, Any]:
  d = g.difference
  return {
    "label": g.label,
    "keys": g.keys,
    "best": g.best.settings,
    "loss": g.mean,
    "deviation": g.deviation,
    "losses": {f"{s},{d}": loss for (s, d), loss in g.best.losses.items()},
    "difference": d and d.mean,
    "pairs": d.pairs if d else 0,
    "intervals": {k: i._asdict() for k, i in d.intervals.items()} if d else {},
    "to_target": g.to_target,
    "warnings": g.warnings,
    **{name: g.spent(name) for name in ("tokens", "compute", "time")},
    "cells": [
      {**c.settings, "losses": {f"{s},{d}": loss for (s, d), loss in c.losses.items()}}
      for c in g.cells
    ],
    "runs": [str(r.path) for r in g.best.runs.values()],
  }


def table(report: Report) -> tables.Table:
  found = report.to_json()
  head, rows = tables.comparison(found)
  to_target = [tables.number(g["to_target"], ".4g", "never") for g in found["groups"]]
  rows = [[*row, target] for row, target in zip(rows, to_target, strict=True)]
  return tables.Table([*head, "to target"], rows)


def text(report: Report) -> str:
  """The report as a table with notes."""
  unit = VIEWS[report.view].unit
  where = "after the last step" if report.budget is None else f"at {report.budget:.4g} {unit}"
  found = report.to_json()
  lines = [f"eval loss {where}", *tables.plain(table(report))]
  lines += [f"the interval covers {what}" for what in tables.covered(found)]
  if report.target is not None:
    lines.append(f"to target: {unit} until eval loss {report.target:.4f}")
  return "\n".join([*lines, *report.notes])
