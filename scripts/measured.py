"""Tables and figures of what was measured on final models, by method and seed."""

import io
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from page import Figure

from nanosam import plots, tables
from nanosam.errors import UserError
from nanosam.tables import Table

# Entries of sharpness.json, and how they are called in print.
COLUMNS = {
  "lambda_max": "λ_max(H)",
  "lambda_max_HG": "λ_max(H_G)",
  "lambda_min": "λ_min(H)",
  "trace_H": "tr(H)",
  "trace_HG": "tr(H_G)",
  "trace_HF": "tr(H_F)",
  "tau_logit": "τ_logit",
  "tau_func": "τ_func",
  "tau_cross": "τ_cross",
}
ByMethod = Mapping[str, Sequence[Mapping[str, Any]]]


def read(workdir: pathlib.Path, file: str, step: int) -> list[dict[str, Any]]:
  """The measurement of a run's final model, if it was made."""
  path = workdir / file
  try:
    found = json.loads(path.read_text()) if path.is_file() else {}
  except ValueError as e:
    raise UserError(f"{path} is damaged ({e}): measure that run again, or remove it") from e
  return [found] if found.get("step") == step else []


def sharpness(found: ByMethod, paper: Mapping[str, Mapping[str, float]]) -> Table:
  """Means over seeds; what the paper has, at its scale, stands in brackets."""
  columns = {k: v for k, v in COLUMNS.items() if any(k in m for ms in found.values() for m in ms)}
  rows = []
  for method, members in found.items():
    cells = []
    for key in columns:
      values = [m[key]["value"] for m in members if key in m]
      mean = tables.number(statistics.fmean(values) if values else math.nan, ".4g")
      theirs = paper.get(method, {}).get(key)
      cells.append(mean + (f" ({theirs:g})" if theirs is not None else ""))
    if members:
      rows.append([method, str(len(members)), *cells])
  return Table(["method", "seeds", *columns.values()], rows)


def pruning(found: ByMethod, name: str) -> list[Figure]:
  members = {method: runs for method, runs in found.items() if runs}
  if not members:
    return []
  plots.pruning(buffer := io.StringIO(), [run for runs in members.values() for run in runs])
  losses: dict[float, dict[str, list[float]]] = {}
  for method, runs in members.items():
    for run in runs:
      for point in run["points"]:
        losses.setdefault(point["sparsity"], {}).setdefault(method, []).append(point["loss"])
  rows = [
    [f"{x:g}", *(f"{statistics.fmean(y[m]):.4f}" if m in y else "" for m in members)]
    for x, y in sorted(losses.items())
  ]
  caption = "Eval loss after setting the smallest weights to zero, without training again"
  return [
    Figure(f"{name}-pruning", caption, buffer.getvalue(), Table(["sparsity", *members], rows))
  ]
