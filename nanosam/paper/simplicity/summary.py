"""The numbers of the experiment, from its runs: means, medians and paired differences to GD."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanosam.paper.simplicity.experiment import TASK, Result, Settings
from nanosam.paper.simplicity.training import EVERY, FRACTIONS, entropy
from nanosam.study import paired

BUDGETS = (1000, 2000, 4000, 6000)  # steps, and gradients; fixed before any run
CONFIDENCE = 0.95

Numbers = Mapping[str, Any]  # as they stand in results.json


def difference(values_S: np.ndarray, base_S: np.ndarray) -> dict[str, Any]:
  """Over the seeds for which both are known."""
  delta_S = values_S - base_S
  delta_S = delta_S[np.isfinite(delta_S)]
  found: dict[str, Any] = {"pairs": len(delta_S), "mean": None, "low": None, "high": None}
  if len(delta_S):
    found["mean"] = float(delta_S.mean())
  if interval := paired.over_seeds(delta_S, CONFIDENCE):
    found |= {"low": float(interval.low), "high": float(interval.high)}
  return found


def summarize(settings: Settings, result: Result, base: Result) -> dict[str, Any]:
  """Of one arm; `base` is gradient descent's."""
  times_SxD = result.times_SxFxD[:, 0]
  finished_S = np.isfinite(times_SxD).all(1)
  both_S = finished_S & np.isfinite(base.times_SxFxD[:, 0]).all(1)
  entropy_S = entropy(times_SxD)
  # A run that has not learned a feature will learn it later, if ever: it counts as larger than any.
  ordered_SxD = np.sort(np.where(np.isfinite(times_SxD), times_SxD, np.inf), 1)
  return {
    "arm": result.arm.name,
    "upsampled": float(result.upsampled),
    "entropy": float(entropy_S[finished_S].mean()) if finished_S.any() else None,
    "difference": difference(entropy_S, entropy(base.times_SxFxD[:, 0])),
    "unfinished": int(np.sum(~finished_S)),
    "stuck": int(np.sum(~np.isfinite(times_SxD).any(1))),
    "median_times": np.median(ordered_SxD, 0).tolist(),
    "by_fraction": {
      f"{fraction:g}": difference(
        entropy(result.times_SxFxD[:, f]), entropy(base.times_SxFxD[:, f])
      )
      for f, fraction in enumerate(FRACTIONS)
    },
    "at_steps": budgets(settings, result, base, by_gradients=False),
    "at_gradients": budgets(settings, result, base, by_gradients=True),
    "at_the_end": difference(
      np.where(both_S, result.test_SxT[:, -1], np.nan), base.test_SxT[:, -1]
    ),
  }


def budgets(
  settings: Settings, result: Result, base: Result, *, by_gradients: bool
) -> dict[str, Any]:
  """Test loss at each budget that training reaches; nothing where a proxy takes all of it."""
  found = {}
  for budget in BUDGETS:
    steps = result.arm.steps_for(budget, settings.proxy_steps) if by_gradients else budget
    if 0 < steps and budget <= settings.steps:
      test_S, base_S = result.test_SxT[:, steps // EVERY], base.test_SxT[:, budget // EVERY]
      found[str(budget)] = {"median": float(np.median(test_S)), **difference(test_S, base_S)}
  return found


def runs_table(studies: Sequence[tuple[Settings, Sequence[Result]]]) -> str:
  """Every run, a line each, as CSV."""
  buffer = io.StringIO()
  writer = csv.writer(buffer, lineterminator="\n")
  features = [f"learned_{m + 1}" for m in range(len(TASK.spectrum))]
  losses = [f"test_loss_{b}" for b in BUDGETS]
  writer.writerow(["heads", "sigma", "arm", "seed", *features, "entropy", *losses])
  for settings, results in studies:
    for r in results:
      entropy_S = entropy(r.times_SxFxD[:, 0])
      for s, even in enumerate(entropy_S):
        name = [settings.heads, f"{settings.sigma:g}", r.arm.name, settings.first_seed + s]
        times = [f"{t:.0f}" if np.isfinite(t) else "" for t in r.times_SxFxD[s, 0]]
        test = [f"{r.test_SxT[s, b // EVERY]:.6f}" if b <= settings.steps else "" for b in BUDGETS]
        writer.writerow([*name, *times, f"{even:.5f}" if np.isfinite(even) else "", *test])
  return buffer.getvalue()
