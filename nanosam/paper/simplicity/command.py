"""scripts/reproduce.py simplicity: runs the experiment and writes its page."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nanosam.paper.simplicity import experiment, figure, page, theory
from nanosam.paper.simplicity.experiment import (
  ARMS,
  BASELINE,
  OTHER_ARMS,
  TASK,
  Arm,
  Result,
  Settings,
)
from nanosam.paper.simplicity.summary import runs_table, summarize
from nanosam.paper.simplicity.training import EVERY
from nanosam.paper.simplicity.upsampling import CHECKPOINTS
from nanosam.study.figures import check_installed
from nanosam.system.command_line import with_pairs
from nanosam.system.errors import UsageError
from nanosam.system.files import disk_errors, strict_json, write_atomically, write_json

THEORY_RHO = (0.2, 0.4, 0.8)  # in units of sigma; Theorem 4.4 needs less than sqrt(3) / 2

IN_TITLE = ("2000", "6000")  # budgets

Say = Callable[[str], None]


def run(out: pathlib.Path, settings: Settings, argv: list[str], say: Say) -> None:
  check_installed()
  with disk_errors(out):
    out.mkdir(parents=True, exist_ok=True)
  with jax.enable_x64(True):
    main = run_setting(settings, ARMS, say)
    others = [(s, run_setting(s, OTHER_ARMS, say)) for s in experiment.others(settings)]
  results = strict_json(
    {
      "experiment": "simplicity",
      "command": argv,
      "settings": dataclasses.asdict(settings),
      "spectrum": list(TASK.spectrum),
      "pairs_in_context": TASK.N,
      "plateaus": TASK.plateaus.tolist(),
      "arms": rows(settings, main),
      "other": [{"settings": dataclasses.asdict(s), "arms": rows(s, found)} for s, found in others],
      "theory": [
        {
          "rho_in_sigma": r,
          **theory.entropies(TASK.eigenvalues_D, settings.sigma, r * settings.sigma),
        }
        for r in THEORY_RHO
      ],
    }
  )
  write_json(out / "results.json", results)
  studies = [(s, list(found.values())) for s, found in [(settings, main), *others]]
  write_atomically(out / "runs.csv", runs_table(studies).encode())
  titles = {name: title(results, name) for name in page.DRAWN}
  figure.curves(out / "curves", main, titles)
  arms = {name: result.arm for name, result in main.items()}
  figure.differences(out / "differences", results["arms"], arms)
  write_atomically(out / "README.md", page.write(results).encode())
  say(f"written: {out}/README.md, results.json, runs.csv and figures")


def run_setting(settings: Settings, arms: tuple[Arm, ...], say: Say) -> dict[str, Result]:
  start, found = time.monotonic(), {}
  for result in experiment.run(settings, arms):
    found[result.arm.name] = result
    row = summarize(settings, result, found[BASELINE])
    say(
      f"heads {settings.heads}, sigma {settings.sigma:g}, {row['arm']}: entropy minus GD's "
      f"{page.signed(row['difference'], 3) or 'unknown'}, {row['unfinished']} of {settings.seeds} "
      f"unfinished ({time.monotonic() - start:.0f} s)"
    )
  return found


def rows(settings: Settings, results: Mapping[str, Result]) -> list[dict[str, Any]]:
  return [summarize(settings, result, results[BASELINE]) for result in results.values()]


def title(results: Mapping[str, Any], name: str) -> str:
  row = next(r for r in results["arms"] if r["arm"] == name)
  medians = {budget: f"{found['median']:.4f}" for budget, found in row["at_steps"].items()}
  return "\n".join([name, *(f"median {medians[b]} at {b} steps" for b in IN_TITLE if b in medians)])


def changed(settings: Settings, pairs: list[str]) -> Settings:
  """With NAME=VALUE pairs of a command line."""
  settings = with_pairs(settings, pairs)
  if min(dataclasses.astuple(settings)) < 0 or not (settings.heads and settings.seeds):
    raise UsageError("settings are positive numbers")
  for name, unit in (("steps", EVERY), ("proxy_steps", EVERY * CHECKPOINTS)):
    if getattr(settings, name) <= 0 or getattr(settings, name) % unit:
      raise UsageError(f"{name}={getattr(settings, name)}: take a multiple of {unit}")
  return settings
