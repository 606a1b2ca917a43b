"""Blocks of the page that experiments and sets of runs share."""

import io
import math
import statistics
from collections.abc import Mapping
from typing import Any

from nanosam.paper.experiments import ADAMW
from nanosam.paper.measures import Found
from nanosam.paper.page import Block, Figure, Folded, Grid, Items, Text
from nanosam.paper.protocol import RHO
from nanosam.study import figures, tables
from nanosam.study.comparison import Report
from nanosam.study.tables import Table

Losses = Mapping[str, float | None]  # the paper's, by method; None where it diverged


def comparison(caption: str, report: Mapping[str, Any], paper: Losses | None = None) -> list[Block]:
  """A comparison in its JSON form, with its notes."""
  return [
    Grid(caption, tables.comparison(report, paper)),
    *(Text(f"The interval covers {what}.") for what in tables.covered(report)),
    Items(report["notes"]),
  ]


def tried(report: Mapping[str, Any]) -> Block:
  return Folded("Every setting tried", [Grid("Every setting tried", tables.cells(report))])


def difference_rows(report: Mapping[str, Any], paper: Losses) -> list[figures.Row]:
  rows = []
  for g in report["groups"]:
    if g["difference"] is None:
      continue
    i, theirs, base = tables.interval(g), paper.get(g["label"]), paper.get(ADAMW)
    published = theirs - base if theirs is not None and base is not None else None
    low, high = (i["low"], i["high"]) if i else (None, None)
    rows.append(figures.Row(g["label"], g["difference"], low, high, published))
  return rows


def differences_figure(report: Mapping[str, Any], paper: Losses, name: str) -> list[Figure]:
  rows = difference_rows(report, paper)
  if not rows:
    return []
  figures.differences(buffer := io.StringIO(), rows)
  values = Table(
    ["method", f"minus {ADAMW}", "low", "high", "paper"],
    [[r.method, *(tables.number(x, "+.4f") for x in r[1:])] for r in rows],
  )
  caption = f"Eval loss minus {ADAMW}'s"
  return [Figure(f"{name}-differences", caption, buffer.getvalue(), values)]


def pruning_figure(found: Found, name: str) -> list[Figure]:
  """`found`: prune.json of the final models."""
  members = {method: runs for method, runs in found.items() if runs}
  if not members:
    return []
  figures.pruning(buffer := io.StringIO(), [run for runs in members.values() for run in runs])
  losses: dict[float, dict[str, list[float]]] = {}
  for method, runs in members.items():
    for point in (p for run in runs for p in run["points"]):
      losses.setdefault(point["sparsity"], {}).setdefault(method, []).append(point["loss"])
  rows = [
    [f"{x:g}", *(f"{statistics.fmean(y[m]):.4f}" if m in y else "" for m in members)]
    for x, y in sorted(losses.items())
  ]
  caption = "Eval loss after setting the smallest weights to zero, without retraining"
  values = Table(["sparsity", *members], rows)
  return [Figure(f"{name}-pruning", caption, buffer.getvalue(), values)]


def rho_points(report: Report) -> tuple[dict[str, list[tuple[float, float]]], float]:
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
