"""The figures: test loss over training, and how evenly the features are learned."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from nanosam.paper.simplicity.experiment import BASELINE, TASK, Arm, Result
from nanosam.paper.simplicity.summary import Numbers
from nanosam.paper.simplicity.training import EVERY
from nanosam.study.figures import BLUE, BROWN, GREEN, INK, MUTED, STYLES, figure

DRAWN = 25  # runs in a panel, as many as the paper's figure has
SHOWN = 4000  # steps


def curves(target: pathlib.Path, results: Mapping[str, Result], titles: Mapping[str, str]) -> None:
  """A panel for each of `titles`; the dotted lines are the plateaus in closed form."""
  with figure(target, (3.6 * len(titles), 3.4), len(titles)) as axes:
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
      test_SxT = results[name].test_SxT[:DRAWN, : SHOWN // EVERY + 1]
      steps_T = EVERY * np.arange(test_SxT.shape[1])
      ax.plot(steps_T, test_SxT.T, color=_style(results[name].arm)[0], linewidth=0.6, alpha=0.7)
      ax.plot(steps_T, np.median(results[name].test_SxT, 0)[: len(steps_T)], color=INK, linewidth=2)
      ax.hlines(TASK.plateaus, 0, steps_T[-1], colors=MUTED, linestyles="dotted", linewidth=1)
      ax.set_title(title, fontsize=9)
      ax.set(xlabel="step", ylim=(0.1, 1.05))
      ax.grid(visible=False)
    axes[0].set_ylabel("test loss")


def differences(target: pathlib.Path, rows: Sequence[Numbers], arms: Mapping[str, Arm]) -> None:
  """Entropy minus GD's, with its interval: to the right, features are learned more evenly."""
  shown = [r for r in rows if r["arm"] != BASELINE and r["difference"]["low"] is not None]
  with figure(target, (7.4, 1.1 + 0.26 * len(shown))) as (ax,):
    for y, row in enumerate(shown):
      found, (colour, marker) = row["difference"], _style(arms[row["arm"]])
      ax.plot([found["low"], found["high"]], [y, y], color=colour, linewidth=2)
      ax.plot(found["mean"], y, color=colour, marker=marker, markersize=6)
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(shown)), [_label(row) for row in shown])
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlabel("entropy minus GD's, 95 % interval")


def _label(row: Numbers) -> str:
  return row["arm"] + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else "")


def _style(arm: Arm) -> tuple[str, str]:
  if arm.upsampled:
    return (BLUE, "v") if arm.upsampled.startswith("hard") else (GREEN, "P")
  if arm.per_head:
    return BROWN, "p"
  return STYLES[arm.method] if arm.rho else (MUTED, "o")
