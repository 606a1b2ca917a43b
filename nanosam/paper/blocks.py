"""Blocks of the page that experiments and sets of runs share; a figure of nothing is no figure."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanosam.paper.experiments import ADAMW
from nanosam.paper.measures import Found
from nanosam.paper.page import Block, Figure, Folded, Grid, Items, Text
from nanosam.paper.protocol import RHO
from nanosam.study import figures, tables
from nanosam.study.comparison import Report
from nanosam.study.figures import Curves
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


def differences_figure(report: Mapping[str, Any], paper: Losses, name: str = "") -> list[Figure]:
  rows, base = [], paper.get(ADAMW)
  for g in report["groups"]:
    if g["difference"] is not None:
      i, theirs = tables.interval(g), paper.get(g["label"])
      published = theirs - base if theirs is not None and base is not None else None
      low, high = (i["low"], i["high"]) if i else (None, None)
      rows.append(figures.Row(g["label"], g["difference"], low, high, published))
  values = Table(
    ["method", f"minus {ADAMW}", "low", "high", "paper"],
    [[r.method, *(tables.number(x, "+.4f") for x in r[1:])] for r in rows],
  )
  draw = functools.partial(figures.differences, rows=rows)
  return [Figure(f"{name}-differences", f"Eval loss minus {ADAMW}'s", values, draw)] if rows else []


def pruning_figure(found: Found, name: str = "") -> list[Figure]:
  """`found`: prune.json of the final models."""
  runs = [run for members in found.values() for run in members]
  caption = "Eval loss after setting the smallest weights to zero, without retraining"
  values = values_of("sparsity", figures.pruning_curves(runs), ".4f")
  draw = functools.partial(figures.pruning, runs=runs)
  return [Figure(f"{name}-pruning", caption, values, draw)] if runs else []


def rho_figure(report: Report, name: str = "") -> list[Figure]:
  curves, baseline = rho_curves(report)
  caption = f"Eval loss against rho, on the seeds that every rho has; dashed: {ADAMW}"
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
