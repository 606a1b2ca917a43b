"""Measurements on the final models of an experiment: their sharpness, what pruning does to them."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanosam.curvature import pruning, sharpness
from nanosam.paper import published
from nanosam.paper.protocol import ADAMW, Lab, Setting
from nanosam.study import comparison, plots, runs, tables
from nanosam.system.errors import UserError

FILES = {"sharpness": sharpness.FILE, "prune": pruning.FILE}
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
Report = comparison.Report | None


def finals(lab: Lab, report: Report) -> dict[str, list[runs.Run]]:
  """The runs of each method's best setting."""
  groups = report.groups if report else []
  return {g.label: list(g.best.runs.values()) for g in groups if g.label in lab.methods}


def measure(lab: Lab, what: str, say: Callable[[str], None], remote: str = "") -> None:
  """Each in a process of its own; what is there already is skipped.

  The checkpoints of runs made elsewhere are read from the folder `remote`.
  """
  chosen = [
    run
    for setting in lab.settings
    for members in finals(lab, lab.report(setting)).values()
    for run in members
  ]
  if not chosen:
    raise UserError(f"{lab.name} has no finished runs in {lab.folder} to measure; train them first")
  for number, run in enumerate(chosen, 1):
    if stored(run, what):
      continue
    say(f"[{number}/{len(chosen)}] {what} of {run.path.name}")
    workdir = f"{remote.rstrip('/')}/{run.path.name}" if remote else run.path
    words = [f"--workdir={workdir}", f"--out={run.path}"]
    command = [sys.executable, "-m", f"nanosam.{what}", *words]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
      raise UserError(f"{what} of {run.path} failed; the line above says why")


def stored(run: runs.Run, what: str) -> dict[str, Any] | None:
  """The measurement of the final model, if it was made."""
  file = run.path / FILES[what]
  try:
    found = json.loads(file.read_text()) if file.is_file() else {}
  except ValueError as e:
    raise UserError(f"{file} is damaged ({e}): measure that run again, or remove it") from e
  return found if found.get("step") == run.steps else None


def collect(lab: Lab, report: Report) -> dict[str, dict[str, list[dict[str, Any]]]]:
  """By kind and method, one for each seed."""
  return {
    what: {
      method: [found for run in members if (found := stored(run, what))]
      for method, members in finals(lab, report).items()
    }
    for what in lab.measures
  }


def section(lab: Lab, setting: Setting, report: Report) -> list[str]:
  """Of the final models; the paper's numbers, at its scale, in brackets."""
  paper = published.SHARPNESS.get(lab.name, {}).get(setting.paper, {})
  table = sharpness_table(collect(lab, report).get("sharpness", {}), paper)
  if not table.rows:
    return []
  note = ["In brackets: the paper's, at its scale.", ""] if paper else []
  return ["### sharpness", "", *tables.markdown(table), *note]


def sharpness_table(
  found: Mapping[str, Sequence[Mapping[str, Any]]], paper: Mapping[str, Mapping[str, float]]
) -> tables.Table:
  """Means over seeds by method; what the paper has stands in brackets."""
  columns = {k: v for k, v in COLUMNS.items() if any(k in m for ms in found.values() for m in ms)}
  rows = []
  for method, members in found.items():
    cells = []
    for key in columns:
      values = [m[key]["value"] for m in members if key in m]
      theirs = paper.get(method, {}).get(key)
      mean = f"{np.mean(values):.4g}" if values else ""
      cells.append(mean + (f" ({theirs:g})" if theirs is not None else ""))
    if members:
      rows.append([method, str(len(members)), *cells])
  return tables.Table(["method", "seeds", *columns.values()], rows)


def draw(lab: Lab, reports: dict[str, Report], folder: pathlib.Path) -> None:
  if "tau" in lab.stages:
    for prefix, name in (("tau", "taus"), ("tau_precond", "taus_precond")):
      panels = {
        label: plots.tau_series(finals(lab, report)[ADAMW][0].path, prefix)
        for label, report in reports.items()
        if report
      }
      plots.taus(folder / name, panels)
  for label, report in reports.items():
    found = collect(lab, report).get("prune", {})
    if members := [m for by_seed in found.values() for m in by_seed]:
      suffix = "" if len(reports) == 1 else "-" + label.replace(" ", "")
      plots.pruning(folder / f"prune{suffix}", members)
