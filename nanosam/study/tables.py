"""Comparisons as tables of text: plain, Markdown, CSV or LaTeX.

They are built from the JSON form of a comparison (comparison.Report.to_json), so that a stored one
reads like a new one; null stands for a loss that is not finite.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Short names of keys that are tuned or swept.
SHORT = {
  "opt.peak_learning_rate": "lr",
  "opt.weight_decay": "wd",
  "opt.num_train_steps": "steps",
  "model.D": "width",
  "model.L": "length",
}
# Intervals, the widest claim first, and what they cover in a few words; see study/paired.py.
COVERS = {"both": "seeds and text", "seeds": "seeds", "units": "other text only"}
LOSS = "eval loss (nats)"  # per token, or per image


class Table(NamedTuple):
  head: list[str]
  rows: list[list[str]]


def show(value: Any) -> str:
  """A value of a setting; an empty one, such as data.weights, is none."""
  if value == "":
    return "none"
  return f"{value:g}" if isinstance(value, float) else str(value)


def settings(values: Mapping[str, Any]) -> str:
  """lr 0.006, wd 0.1, rho 0.03"""
  return ", ".join(f"{SHORT.get(k, k.split('.')[-1])} {show(v)}" for k, v in values.items())


def number(value: float | None, form: str, otherwise: str = "") -> str:
  return otherwise if value is None or not math.isfinite(value) else f"{value:{form}}"


def interval(group: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """The one that covers most."""
  return next(filter(None, map(group["intervals"].get, COVERS)), None)


def covers(group: Mapping[str, Any]) -> str:
  """What varies in its interval; of one seed that is the text alone."""
  return next((words for kind, words in COVERS.items() if group["intervals"].get(kind)), "")


def interval_head(report: Mapping[str, Any]) -> str:
  """`95 % interval`; comparisons before this was on record were all of that confidence."""
  return f"{100 * report.get('confidence', 0.95):g} % interval"


def interval_text(group: Mapping[str, Any]) -> str:
  i = interval(group)
  return f"{i['low']:+.4f} to {i['high']:+.4f}" if i else ""


def covered(report: Mapping[str, Any]) -> list[str]:
  """What the intervals of a comparison cover."""
  return sorted({i["covers"] for g in report["groups"] if (i := interval(g))})


def comparison(report: Mapping[str, Any], paper: Mapping[str, float | None] | None = None) -> Table:
  """A row for each group; `paper` has the published loss of some, None where it diverged."""
  baseline = report["baseline"]
  base = next((g for g in report["groups"] if g["label"] == baseline), None)
  by = ", ".join(k.split(".")[-1] for k in report["groups"][0]["keys"])
  head = [by, LOSS, "sd", "seeds", f"minus {baseline}", interval_head(report), "covers"]
  head += [f"FLOPs to {baseline}", "settings", "beware"]
  head += ["paper", f"paper minus {baseline}"] if paper else []
  rows = []
  for g in report["groups"]:
    cost = g["compute"]
    ratio = cost / base["compute"] if base and cost and base["compute"] else None
    row = [
      g["label"],
      number(g["loss"], ".4f", "diverged"),
      number(g["deviation"], ".4f"),
      str(len(g["losses"])),
      number(g["difference"], "+.4f"),
      interval_text(g),
      covers(g),
      number(ratio, ".2f"),
      settings(g["best"]),
      "; ".join(g.get("warnings", [])),
    ]
    rows.append(row + (_published(paper, g["label"], baseline) if paper else []))
  return Table(head, rows)


def _published(paper: Mapping[str, float | None], label: str, baseline: str) -> list[str]:
  if label not in paper:
    return ["", ""]
  loss, base = paper[label], paper.get(baseline)
  if loss is None:
    return ["NaN", ""]
  return [f"{loss:g}", "" if base is None or label == baseline else f"{loss - base:+.4g}"]


def cells(report: Mapping[str, Any]) -> Table:
  """Everything that was tried, not only what won."""
  rows = []
  for g in report["groups"]:
    tried = [({k: v for k, v in c.items() if k != "losses"}, c["losses"]) for c in g["cells"]]
    for values, losses in sorted(
      tried, key=lambda c: [(isinstance(v, str), v) for v in c[0].values()]
    ):
      by_seed = [
        f"{seed.split(',')[0]}: {number(loss, '.4f', 'diverged')}" for seed, loss in losses.items()
      ]
      rows.append([g["label"], settings(values), ", ".join(by_seed)])
  return Table(["method", "settings", f"{LOSS} by seed"], rows)


def numeric_columns(table: Table) -> list[bool]:
  """Which columns hold numbers, and so are aligned right."""
  return [any(map(_is_number, column)) for column in _columns(table)]


def _columns(table: Table) -> list[tuple[str, ...]]:
  return list(zip(table.head, *table.rows, strict=True))


def _is_number(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def plain(table: Table) -> list[str]:
  """Lines for a terminal."""
  widths = [max(map(len, column)) for column in _columns(table)]
  right = numeric_columns(table)
  return [
    "  ".join(
      f"{x:>{w}}" if is_right else f"{x:<{w}}"
      for x, w, is_right in zip(row, widths, right, strict=True)
    ).rstrip()
    for row in (table.head, *table.rows)
  ]


def markdown(table: Table) -> list[str]:
  def line(row: Sequence[str]) -> str:
    return f"| {' | '.join(x.replace('|', chr(92) + '|') for x in row)} |"

  return [line(table.head), f"|{'---|' * len(table.head)}", *map(line, table.rows), ""]


def csv_lines(table: Table) -> list[str]:
  out = io.StringIO()
  csv.writer(out, lineterminator="\n").writerows([table.head, *table.rows])
  return out.getvalue().splitlines()


def latex(table: Table) -> list[str]:
  """A tabular for the booktabs package."""
  columns = "".join("r" if is_right else "l" for is_right in numeric_columns(table))

  def line(row: Sequence[str]) -> str:
    return " & ".join(map(_latex_text, row)) + r" \\"

  rows = [r"\toprule", line(table.head), r"\midrule", *map(line, table.rows), r"\bottomrule"]
  return [rf"\begin{{tabular}}{{{columns}}}", *rows, r"\end{tabular}"]


_LATEX = {
  **{c: rf"\{c}" for c in "&%$#_{}"},
  **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
  **{"λ": r"$\lambda$", "τ": r"$\tau$", "\u03c1": r"$\rho$", "±": r"$\pm$", "\u2212": "$-$"},
  "⁻¹": "$^{-1}$",
}


def _latex_text(text: str) -> str:
  def shown(m: re.Match[str]) -> str:
    return f"${m[0]}$" if m["sign"] else _LATEX.get(m[0], m[0])

  return re.sub(r"(?P<sign>(?<![\w.])[+-](?=\d))|⁻¹|.", shown, text)  # a minus, not a hyphen


FORMATS = {"plain": plain, "markdown": markdown, "csv": csv_lines, "latex": latex}
