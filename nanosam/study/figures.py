"""Figures, as SVG and PNG; needs matplotlib: pip install -e '.[report]'."""

import contextlib
import functools
import importlib.util
import io
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study.comparison import CONFIDENCE
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import disk_errors

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers for print.
INK, MUTED, GRID = "#000000", "#777777", "#e6e6e6"
ORANGE, SKY, GREEN, BLUE, RED, PINK, BROWN = (
  *("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
  "#8C564B",
)
STYLES = {
  "adamw": (INK, "o"),
  "sam": (RED, "s"),
  "precond_sam": (ORANGE, "D"),
  "func_sam": (SKY, "^"),
  "precond_func_sam": (BLUE, "v"),
  "momentum_func_sam": (GREEN, "P"),
  "momentum_precond_func_sam": (GREEN, "H"),
  "momentum_sam": (BROWN, "p"),
  "logit_sam": (PINK, "h"),
  "asam": (BROWN, "d"),
}
OTHER = (PINK, "X")
# Replacements on a dark page.
DARK = {INK: "#f0f0f0", MUTED: "#a0a0a0", GRID: "#3a3a3a", BLUE: "#8aa6ff", BROWN: "#c49a8f"}
SETTINGS: Any = {
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.color": GRID,
  "axes.axisbelow": True,
  "font.size": 10,
  "legend.frameon": False,
  "legend.fontsize": 8.5,
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "nanosam",  # the same figure is the same file
}
Target = pathlib.Path | io.StringIO  # where a figure goes: files, or the text of an SVG
Curve = tuple[np.ndarray, np.ndarray]  # x, y
Curves = Mapping[str, Mapping[Any, Curve]]  # by method and seed


def check_installed() -> None:
  if not importlib.util.find_spec("matplotlib"):
    raise UserError("figures need matplotlib: pip install -e '.[report]'")


@contextlib.contextmanager
def figure(target: Target, panels: int, size: tuple[float, float]) -> Iterator[Any]:
  """Axes to draw on; writes target.svg and target.png, or the SVG into a buffer."""
  check_installed()
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context(SETTINGS):
    fig = Figure(figsize=size, layout="constrained")
    yield fig.subplots(1, panels, squeeze=False)[0]
    if isinstance(target, io.StringIO):
      fig.savefig(target, format="svg", metadata={"Date": None}, transparent=True)
      return
    stem = target.name.removesuffix(".svg").removesuffix(".png")
    with disk_errors(target):
      target.parent.mkdir(parents=True, exist_ok=True)
      fig.savefig(target.with_name(f"{stem}.svg"), metadata={"Date": None})
      fig.savefig(target.with_name(f"{stem}.png"), dpi=150)


ONE_PANEL = (5.2, 3.5)


def losses(target: Target, runs: Curves, x_label: str, baseline: str = "") -> None:
  """Eval loss; with a baseline, a second panel has the paired distance to it.

  Lines are means over seeds, bands the range over seeds.
  """
  with figure(target, 2 if baseline else 1, (9, 3.6) if baseline else ONE_PANEL) as (ax, *beside):
    for method, by_seed in runs.items():
      _band(ax, *mean_curve(by_seed), *STYLES.get(method, OTHER), method)
    # The first evaluations are far above the rest, which is what one wants to see.
    every = [y for by_seed in runs.values() for _, y in by_seed.values()]
    low, top = min(y.min() for y in every), max(np.median(y) for y in every)
    if top > low:
      ax.set_ylim(low - 0.1 * (top - low), low + 3 * (top - low))
    ax.set(xlabel=x_label, ylabel="eval loss")
    ax.legend(loc="upper right")
    if baseline:
      _draw_gaps(beside[0], runs, x_label, baseline)


def gaps(target: Target, runs: Curves, x_label: str, baseline: str) -> None:
  """The paired distance to the baseline."""
  with figure(target, 1, ONE_PANEL) as (ax,):
    _draw_gaps(ax, runs, x_label, baseline)
    _legend_above(ax)


def _draw_gaps(ax: Any, runs: Curves, x_label: str, baseline: str) -> None:
  base = runs.get(baseline, {})
  for method, by_seed in runs.items():
    if method != baseline and (found := gap(by_seed, base)):
      _band(ax, *found, *STYLES.get(method, OTHER), method)
  ax.axhline(0, color=INK, linewidth=1)
  ax.set(xlabel=x_label, ylabel=f"eval loss minus {baseline}")


def mean_curve(by_seed: Mapping[Any, Curve]) -> Curve:
  """(x, y by seed) where all seeds were evaluated; a measured x (time) is averaged."""
  xs = [x for x, _ in by_seed.values()]
  if len({len(x) for x in xs}) == 1:
    return np.mean(xs, 0), np.stack([y for _, y in by_seed.values()])
  x = functools.reduce(np.intersect1d, xs)
  return x, np.stack([np.interp(x, *curve) for curve in by_seed.values()])


def gap(by_seed: Mapping[Any, Curve], base: Mapping[Any, Curve]) -> Curve | None:
  """(x, distance to the baseline by seed) where both have values; None if they share no seed."""
  common = [s for s in by_seed if s in base]
  if not common:
    return None
  x, y_SxX = mean_curve({s: by_seed[s] for s in common})
  first, last = (f(base[s][0][i] for s in common) for f, i in ((max, 0), (min, -1)))
  inside = (x > first - 1e-6 * abs(first)) & (x < last + 1e-6 * abs(last))
  base_SxX = np.stack([np.interp(x, *base[s]) for s in common])
  return x[inside], (y_SxX - base_SxX)[:, inside]


def _band(ax: Any, x: np.ndarray, y_SxX: np.ndarray, colour: str, marker: str, label: str) -> None:
  ax.plot(x, y_SxX.mean(0), color=colour, marker=marker, markersize=4, linewidth=1.2, label=label)
  if len(y_SxX) > 1:
    ax.fill_between(x, y_SxX.min(0), y_SxX.max(0), color=colour, alpha=0.2, linewidth=0)


def loss_against_rho(
  target: Target, points: Mapping[str, Sequence[tuple[float, float]]], baseline: float
) -> None:
  """`points[method]` = (rho, eval loss), in any order; `baseline` is AdamW's loss."""
  with figure(target, 1, ONE_PANEL) as (ax,):
    for method, pairs in points.items():
      colour, marker = STYLES.get(method, OTHER)
      x, y = zip(*sorted(pairs), strict=True)
      ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.2, label=method)
    ax.axhline(baseline, color=INK, linestyle="--", linewidth=1, label="adamw")
    ax.set_xscale("log")
    tried = sorted({rho for series in points.values() for rho, _ in series})
    ax.set_xticks(tried, [f"{rho:g}" for rho in tried], minor=False)
    ax.minorticks_off()
    ax.set(xlabel="rho, the length of the perturbation", ylabel="eval loss")
    _legend_above(ax)


def _legend_above(ax: Any) -> None:
  """Above the axes, where it hides nothing."""
  ax.figure.legend(loc="outside upper center", ncols=3)


class Row(NamedTuple):
  method: str
  mean: float
  low: float | None
  high: float | None
  paper: float | None  # the paper's difference


def differences(target: Target, rows: Sequence[Row]) -> None:
  """One line per method: the difference to AdamW with its interval, the paper's as a cross."""
  with figure(target, 1, (6.4, 1.1 + 0.36 * len(rows))) as (ax,):
    for y, row in enumerate(rows):
      colour, marker = STYLES.get(row.method, OTHER)
      if row.low is not None and row.high is not None:
        ax.plot([row.low, row.high], [y, y], color=colour, linewidth=2)
      ax.plot(row.mean, y, color=colour, marker=marker, markersize=6)
      if row.paper is not None:
        ax.plot(row.paper, y, color=MUTED, marker="x", markersize=6, linestyle="none")
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(rows)), [row.method for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    cross = "; x: the paper" if any(row.paper is not None for row in rows) else ""
    ax.set_xlabel(f"eval loss minus adamw, {CONFIDENCE:.0%} interval (left is better){cross}")


def _records(workdir: pathlib.Path) -> list[dict[str, Any]]:
  path = workdir / METRICS_FILE
  if not path.is_file():
    raise UsageError(f"{workdir} has no records: there is no {METRICS_FILE}")
  return read_metrics(path)


def run_curve(target: Target, workdir: pathlib.Path) -> None:
  """Training and eval loss of one run over its steps."""
  records = _records(workdir)
  with figure(target, 1, (6.4, 3.6)) as (ax,):
    for name, label, style in (
      ("train/loss", "training", dict(color=SKY, linewidth=1)),
      ("eval/loss", "eval", dict(color=INK, marker="o", markersize=4)),
    ):
      points = [(r["step"], r[name]) for r in records if name in r]
      ax.plot(*zip(*points, strict=True), label=label, **style)
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.legend()


TAU_STYLES = {"logit": (RED, "s"), "func": (BLUE, "v"), "cross": (INK, "o")}


def taus(target: Target, runs: Mapping[str, Mapping[str, Curve]]) -> None:
  """`runs[label][logit|func|cross]` = (step, tau): a panel per run, as in Figures 2 and 4.

  The first values may be off the scale: at the start the two paths cancel, and they are huge.
  """
  later = [y for series in runs.values() for _, values in series.values() for y in values[1:]]
  low, high = min([-0.2, *later]), max([1.2, *later])
  with figure(target, len(runs), (1.2 + 3.7 * len(runs), 3.4)) as axes:
    for ax, (label, series) in zip(axes, runs.items(), strict=True):
      for name, (steps, values) in series.items():
        colour, marker = TAU_STYLES[name]
        style = dict(color=colour, marker=marker, markersize=4, linewidth=1.2)
        ax.plot(steps, values, label=f"$\\tau_\\mathrm{{{name}}}$", **style)
      ax.axhline(0, color=MUTED, linewidth=0.8)
      ax.set(xlabel="step", title=label)
      ax.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    axes[0].set_ylabel("share of the sharpness gradient")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def landscape(target: Target, found: Mapping[str, Any]) -> None:
  """The loss along the top eigenvector with its parabola, and along random directions."""
  lines, value = found["landscape"], found["lambda_max"]["value"]
  x = np.asarray(lines["distance"])
  with figure(target, 1, (5.6, 3.8)) as (ax,):
    for number, losses in enumerate(lines["random"]):
      label = None if number else "random directions"
      ax.plot(x, losses, color=SKY, marker="^", markersize=4, linewidth=1.2, label=label)
    ax.plot(x, lines["top"], color=INK, marker="o", markersize=4, label="top eigenvector")
    parabola = found["loss"] + lines["top_slope"] * x + 0.5 * value * x**2
    label = f"its parabola, $\\lambda$ = {value:.3g}"
    ax.plot(x, parabola, color=RED, linestyle="--", linewidth=1.2, label=label)
    ax.set(xlabel="distance from the trained parameters", ylabel="loss (nats per token)")
    ax.legend()


def pruning(target: Target, runs: Sequence[Mapping[str, Any]]) -> None:
  """Eval loss by sparsity, mean and range over each method's runs; `runs` as in prune.json."""
  by_method: dict[str, list[Any]] = {}
  for run in runs:
    by_method.setdefault(run["method"], []).append([p["loss"] for p in run["points"]])
  x = np.array([100 * p["sparsity"] for p in runs[0]["points"]])
  with figure(target, 1, (5.6, 3.8)) as (ax,):
    for method, losses in by_method.items():
      _band(ax, x, np.array(losses), *STYLES.get(method, OTHER), method)
    ax.set(xlabel="weights set to zero (%)", ylabel="eval loss")
    ax.legend()


def tau_series(records: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Curve]:
  """(step, tau) of each kind; nothing unless the run was trained with diagnostics.every."""
  measured = [r for r in records if f"{prefix}/logit" in r]
  steps = np.array([r["step"] for r in measured], float)
  kinds = TAU_STYLES if measured else ()
  return {k: (steps, np.array([r[f"{prefix}/{k}"] for r in measured], float)) for k in kinds}


def read_taus(workdir: pathlib.Path, prefix: str) -> dict[str, Curve]:
  if found := tau_series(_records(workdir), prefix):
    return found
  raise UserError(
    f"{workdir} has no {prefix}/logit on record: train it with --config.diagnostics.every=STEPS"
  )
