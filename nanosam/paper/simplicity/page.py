"""README.md of the experiment: every number in it comes from results.json."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nanosam.paper.page import Block, Grid, Items, Section, Text, to_markdown
from nanosam.paper.simplicity.experiment import BASELINE
from nanosam.paper.simplicity.summary import Numbers
from nanosam.study.tables import Table, number

TITLE = "Simplicity bias: in-context linear regression with linear attention"
SAM, FASTER, HARD = "SAM, rho 1 sigma", "GD, step size x 1.3", "upsample hard, relative"
DRAWN = (BASELINE, HARD, SAM)  # panels of curves.svg, in the order of the source's Figure 1
HALF = "SAM, rho 0.5 sigma"  # within what Theorem 4.4 allows, if v starts at sigma
SMALLEST = 5e-5  # a difference in test loss that four decimals show
SOURCE = (
  '"Data Distribution as a Lever for Guiding Optimizers Toward Superior Generalization in LLMs"'
)
MODEL = (
  "A sequence has N pairs (x, y = w x) and a query; the model predicts the query's y. It is one "
  "layer of linear attention with rank-one heads, yhat = beta^T A x_q with A = sum_h v_h k_h q_h^T "
  "and beta = sum_n y_n x_n / N (`nanosam/model/linear_attention.py`). A feature is an eigenvector "
  "of the covariance of x, and it is learned when its entry of A reaches half of its final value. "
  "The entropy is that of the shares of time between one feature and the next: 0 if all come at "
  "once, ln 4 = 1.386 if they come at equal distances. Higher means less simplicity bias. Test "
  "loss is exact, over all sequences. All gradients come from `nanosam.value_and_grad`."
)
ERRORS = (
  "Eq. 9 keeps -2 rho l^2 v / sqrt(3) and drops l^2 rho^2 / 3, which is as large at the start, "
  "where v is of the size of rho. Exact to this order is l^2 (v - rho / sqrt(3))^2: SAM from e to "
  "u takes GD's time from e - rho / sqrt(3) to u - rho / sqrt(3), and never gets there if rho >= "
  "sqrt(3) e. Both are in `nanosam/paper/simplicity/theory.py`.",
  "Lemma 4.1 asks that I - P be invertible; its proof, and Eq. 7, need I + P.",
  "H_qq of Appendix C.1 should be 2 v^2 (k^T E[Shat^2] k) S; as printed it is not symmetric. "
  "Along the gradient of the ansatz the two agree, so that Eq. 9 does not change.",
  "Theorem B.3 takes |S|_F for gamma, and its proof |S|_F^2; it is the Frobenius norm of S^2.",
  "The times of Theorem 4.4 start a clock for each feature; the figure shows durations between "
  "one drop and the next, on one clock. The entropies here are of durations.",
  "The figure's settings, and the step at which its test losses are read, are not given.",
)


def write(results: Mapping[str, Any]) -> str:
  rows = {row["arm"]: row for row in results["arms"]}
  blocks: list[Block] = [
    Text(
      f"After Figure 1 and Theorem 4.4 of {SOURCE}: does SAM, or showing hard examples twice, make "
      f"a model learn its features more evenly, and does it then generalise better? "
      f"{results['settings']['seeds']} paired seeds; made by"
    ),
    Text(f"```\npython {shlex.join(results['command'])}\n```"),
    Section("What came out", [Items([*learning(rows), *generalization(rows, results)])]),
    Text("![test loss over training](curves.svg)"),
    Text(
      "Test loss of 25 runs by step, in the order of the source's figure; black is the median of "
      "all, dotted are the plateaus in closed form "
      f"({', '.join(f'{x:.4f}' for x in results['plateaus'])})."
    ),
    Text("![differences in entropy](differences.svg)"),
    Section("How evenly features are learned", [learned_table(results), *learned_notes(results)]),
    Section("Test loss", test_blocks(results)),
    Section("Other settings, other thresholds", other_blocks(results)),
    Section("What the theorem predicts", theory_blocks(results)),
    Section("Errors in the source", [Items(ERRORS)]),
    Section("Model and settings", [Text(MODEL), Items(settings_items(results))]),
  ]
  return to_markdown(TITLE, blocks)


# ---- Sentences -----------------------------------------------------------------------------------


def learning(rows: Mapping[str, Numbers]) -> list[str]:
  """What the entropies say, arm by arm, and no more than their intervals do."""
  said: dict[str, list[str]] = {}
  for name, row in rows.items():
    if name != BASELINE and row["difference"]["low"] is not None:
      missing = f", {row['unfinished']} unfinished" if row["unfinished"] else ""
      shown = f"{name} ({signed(row['difference'], 3)}{missing})"
      said.setdefault(verdict(row["difference"]), []).append(shown)
  words = {
    "higher": "More evenly than GD",
    "lower": "Less evenly than GD",
    "same": "No clear difference to GD",
  }
  return [f"{words[key]}: {'; '.join(said[key])}." for key in words if key in said]


def generalization(rows: Mapping[str, Numbers], results: Mapping[str, Any]) -> list[str]:
  found = []
  for name in (SAM, HARD, FASTER):
    for key, unit in (("at_steps", "steps"), ("at_gradients", "gradients")):
      if name != FASTER or unit == "steps":
        found.append(
          f"Test loss of {name} against GD's at equal {unit}: {by_budget(rows[name], key)}."
        )
  ends = {name: row["at_the_end"] for name, row in rows.items() if name != BASELINE}
  better = [name for name, d in ends.items() if loss_verdict(d) == "lower"]
  worse = [name for name, d in ends.items() if loss_verdict(d) == "higher"]
  found.append(
    f"After {results['settings']['steps']} steps, among pairs that have learned everything, test "
    f"loss is lower than GD's for: {'; '.join(better) or 'no arm'}. It is higher for: "
    f"{'; '.join(worse) or 'no arm'}."
  )
  return found


def by_budget(row: Numbers, key: str) -> str:
  groups: dict[str, list[str]] = {}
  for budget, found in row[key].items():
    groups.setdefault(loss_verdict(found), []).append(budget)
  words = {"lower": "lower at", "higher": "higher at", "same": "no clear difference at"}
  return "; ".join(f"{words[k]} {listed(groups[k])}" for k in words if k in groups)


def verdict(found: Numbers) -> str:
  if found["low"] is None or found["low"] <= 0 <= found["high"]:
    return "same"
  return "higher" if found["mean"] > 0 else "lower"


def loss_verdict(found: Numbers) -> str:
  tiny = found["mean"] is None or abs(found["mean"]) < SMALLEST
  return "same" if tiny else verdict(found)


def listed(words: Sequence[str]) -> str:
  return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""


def signed(found: Numbers, digits: int) -> str:
  """+0.039 ± 0.020"""
  if found["mean"] is None:
    return ""
  mean = f"{found['mean']:+z.{digits}f}"
  if found["low"] is None:
    return mean
  return f"{mean} ± {(found['high'] - found['low']) / 2:.{digits}f}"


# ---- Tables --------------------------------------------------------------------------------------


ENTROPIES = ["arm", "mean entropy", "minus GD, 95 % interval", "pairs", "unfinished", "stuck"]


def entropies(row: Numbers) -> list[str]:
  counts = row["difference"]["pairs"], row["unfinished"], row["stuck"]
  beside = "" if row["arm"] == BASELINE else signed(row["difference"], 3)
  return [row["arm"], number(row["entropy"], ".3f"), beside, *map(str, counts)]


def learned_table(results: Mapping[str, Any]) -> Block:
  times = "median step at which the 1st, 2nd, 3rd, 4th feature is learned"
  rows = [
    [*entropies(row), ", ".join(number(t, ".0f", "never") for t in row["median_times"])]
    for row in results["arms"]
  ]
  return Grid(f"Of {results['settings']['seeds']} runs each", Table([*ENTROPIES, times], rows))


def learned_notes(results: Mapping[str, Any]) -> list[Block]:
  shares = [
    f"{row['arm'].removeprefix('upsample ')} {row['upsampled']:.0%}"
    for row in results["arms"]
    if row["upsampled"]
  ]
  return [
    Text(
      "Unfinished: some feature not learned after the last step; stuck: none learned. Such runs "
      "have no entropy, and a difference is over the seeds for which both arms have one: where "
      "many are missing, it says little. Intervals are Student's over seeds, each by itself, with "
      "no correction for the number of arms."
    ),
    Text(
      f"Share of the sequences that are shown twice: {', '.join(shares)}. Hard is the upper of two "
      "clusters (2-means) by the losses of a proxy, which starts elsewhere, at five checkpoints: "
      "`trajectory` clusters the losses as they are, which is the source's letter; `last` the last "
      "one; `relative` their logarithms after dividing by the loss of an untrained model. Random "
      "has as many sequences as `relative`; easy too, or all that are not hard if these are fewer."
    ),
  ]


def test_blocks(results: Mapping[str, Any]) -> list[Block]:
  proxy = results["settings"]["proxy_steps"]
  return [
    Text(
      "Medians over seeds, and in brackets the mean paired difference to GD with its 95 % "
      "interval. The budgets were fixed before any run: whichever arm drops first is ahead for a "
      "while, so that a budget chosen afterwards can show anything. So can a median: it falls by a "
      "whole plateau when a few more runs have dropped. The larger step size is the control for "
      "being merely faster."
    ),
    Grid("At equal steps", budget_table(results, "at_steps")),
    Text(
      f"A step of SAM takes two gradients, and upsampling needs its proxy first ({proxy} "
      "gradients of a model of the same size; the five scoring passes are not counted):"
    ),
    Grid("At equal gradients, against GD with as many", budget_table(results, "at_gradients")),
  ]


def budget_table(results: Mapping[str, Any], key: str) -> Table:
  budgets = list(results["arms"][0][key])
  table = Table(["arm", *budgets], [])
  for row in results["arms"]:
    cells = []
    for found in map(row[key].get, budgets):
      beside = f" ({signed(found, 4)})" if found and row["arm"] != BASELINE else ""
      cells.append(f"{found['median']:.4f}{beside}" if found else "still the proxy")
    table.rows.append([row["arm"], *cells])
  return table


def other_blocks(results: Mapping[str, Any]) -> list[Block]:
  blocks: list[Block] = []
  for other in results["other"]:
    main, its = results["settings"], other["settings"]
    changed = ", ".join(f"{name} {its[name]:g}" for name in its if its[name] != main[name])
    blocks.append(Grid(f"With {changed}", Table(ENTROPIES, [*map(entropies, other["arms"])])))
  fractions = list(results["arms"][0]["by_fraction"])
  rows = [
    [r["arm"], *(signed(r["by_fraction"][f], 3) for f in fractions)]
    for r in results["arms"]
    if r["arm"] != BASELINE
  ]
  caption = "Entropy minus GD's if a feature is learned at this share of its final value"
  return [*blocks, Grid(caption, Table(["arm", *fractions], rows))]


def theory_blocks(results: Mapping[str, Any]) -> list[Block]:
  rows = [
    [f"{t['rho_in_sigma']:g}", *(f"{t[k] - t['gd']:+.4f}" for k in ("eq9", "exact"))]
    for t in results["theory"]
  ]
  start = results["theory"][0]
  half = next(r["difference"] for r in results["arms"] if r["arm"] == HALF)
  return [
    Text(
      "Theorem 4.4 is about the early times alone, each on its own clock from v = sigma to "
      f"v = l^(-1/3). Their entropy is {start['gd']:.4f} for GD, and for SAM it is higher, as the "
      "theorem says, by"
    ),
    Grid("Entropy of SAM's times minus GD's", Table(["rho / sigma", "by Eq. 9", "exact"], rows)),
    Text(
      "What is measured above is something else: durations on one clock, from random starts, to "
      f"the middle of each drop ({HALF}: {signed(half, 3)})."
    ),
  ]


def settings_items(results: Mapping[str, Any]) -> list[str]:
  s = results["settings"]
  spectrum = ", ".join(f"{x:g}" for x in results["spectrum"])
  return [
    f"Covariance of x with eigenvalues {spectrum}; {results['pairs_in_context']} pairs in a "
    f"context; {s['sequences']} sequences drawn for each seed, all of them in each step.",
    f"{s['heads']} heads, all parameters N(0, sigma^2) at the start, sigma = {s['sigma']:g}; step "
    f"size {s['step_size']:g}, {s['steps']} steps, float64; seeds {s['first_seed']} to "
    f"{s['first_seed'] + s['seeds'] - 1}, which share start and data over the arms.",
    "Per head: each head's part of eps has length rho by itself.",
    "Every run is in `runs.csv`, what this page says in `results.json`.",
  ]
