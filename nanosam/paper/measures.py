"""Measurements on the final models of an experiment: their sharpness, and how they bear pruning."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanosam.curvature import pruning, sharpness
from nanosam.paper.protocol import Lab
from nanosam.study.comparison import Group
from nanosam.study.runs import Run
from nanosam.study.tables import Table
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
Found = Mapping[str, Sequence[Mapping[str, Any]]]  # measurements by method, one per seed


def measure(lab: Lab, what: str, say: Callable[[str], None], remote: str = "") -> None:
  """Measures every seed of each method's best setting, unless that has been done.

  Each in a process of its own. Checkpoints of runs trained elsewhere are in the folder `remote`.
  """
  reports = [report for s in lab.settings if (report := lab.report(s))]
  chosen = [run for report in reports for g in report.groups for run in g.best.runs.values()]
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


def stored(run: Run, what: str) -> dict[str, Any] | None:
  """The measurement of the final model, if it was made."""
  file = run.path / FILES[what]
  try:
    found = json.loads(file.read_text()) if file.is_file() else {}
  except ValueError as e:
    raise UserError(f"{file} is damaged ({e}): measure that run again, or delete it") from e
  return found if found.get("step") == run.steps else None


def collect(groups: Iterable[Group], what: str) -> Found:
  return {
    g.label: [found for run in g.best.runs.values() if (found := stored(run, what))] for g in groups
  }


def sharpness_table(found: Found, paper: Mapping[str, Mapping[str, float]]) -> Table:
  """Means over seeds by method; the paper's values are in brackets."""
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
  return Table(["method", "seeds", *columns.values()], rows)
