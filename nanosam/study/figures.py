"""Figures, as SVG and PNG; needs matplotlib: pip install -e '.[report]'."""

import collections
import contextlib
import functools
import importlib.util
import io
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study.comparison import ADAMW, CONFIDENCE, Group
from nanosam.study.runs import curve
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import disk_errors

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers for print.
INK, MUTED, GRID = "#000000", "#777777", "#e6e6e6"
ORANGE, SKY, GREEN, BLUE, RED, PINK = "#E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7".split()
BROWN = "#8C564B"
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
  "esam": (RED, "1"),
}
# Cheaper variants have the colour of their method.
_VARIANTS = {
  "every": "<",
  "look": ">",
  "ae": "*",
  "stale": "x",
  "le": "+",
  "top": "2",
  "random": ".",
}
STYLES |= {
  f"{kind}_{name}": (STYLES[name][0], marker)
  for kind, marker in _VARIANTS.items()
  for name in ("sam", "func_sam", "precond_func_sam")
}
# For methods that have no style of their own, such as yours.
SPARE_COLOURS, SPARE_MARKERS = (
  (PINK, GREEN, BROWN, SKY, ORANGE, BLUE, RED),
  ("X", "*", "<", ">", "8"),
)
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
  "lines.linewidth": 1.2,
  "lines.markersize": 4,
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "nanosam",  # the same figure is the same file
}
Target = pathlib.Path | io.StringIO  # where a figure goes: files, or the text of an SVG
Points = tuple[np.ndarray, np.ndarray]  # x, y of one run
Curve = tuple[np.ndarray, np.ndarray]  # x, and y by seed: [X] and [S, X]
Curves = Mapping[str, Curve]  # by method
BySeed = Mapping[str, Mapping[str, Points]]  # by method and seed
Records = Sequence[Mapping[str, Any]]


def styles_of(
  names: Iterable[str], known: Mapping[str, tuple[str, str]] = STYLES
) -> dict[str, tuple[str, str]]:
  """A colour and a marker for each name; those without a style get ones that no other here has."""
  names = list(dict.fromkeys(names))
  found = {name: known[name] for name in names if name in known}
  for name in names:
    if name not in found:
      free = [s for s in itertools.product(SPARE_COLOURS, SPARE_MARKERS) if s not in found.values()]
      used = collections.Counter(part for style in found.values() for part in style)
      found[name] = min(free, key=lambda style: (used[style[0]], used[style[1]]))
  return found


def bands(curves: Curves) -> str:
  """What the bands of a figure are, for its caption."""
  several = any(len(y_SxX) > 1 for _, y_SxX in curves.values())
  return "; bands: from the lowest to the highest seed" if several else ""


def check_installed() -> None:
  if not importlib.util.find_spec("matplotlib"):
    raise UserError("figures need matplotlib: pip install -e '.[report]'")


# ---- what to draw --------------------------------------------------------------------------------


def best_curves(groups: Iterable[Group], axis: str) -> tuple[Curves, Curves]:
  """Eval loss of each method's best setting, and its distance to AdamW's, paired by seed."""
  runs = {g.label: {s: run.curve(axis) for s, run in g.best.runs.items()} for g in groups}
  base = runs.get(ADAMW, {})
  gaps = {m: g for m, by_seed in runs.items() if m != ADAMW and (g := _gap(by_seed, base))}
  return {method: mean_curve(by_seed.values()) for method, by_seed in runs.items()}, gaps


def mean_curve(runs: Iterable[Points]) -> Curve:
  """Where all were evaluated; a measured x (time) is averaged."""
  xs, ys = zip(*runs, strict=True)
  if len({len(x) for x in xs}) == 1:
    return np.mean(xs, 0), np.stack(ys)
  x = functools.reduce(np.intersect1d, xs)
  return x, np.stack([np.interp(x, *points) for points in zip(xs, ys, strict=True)])


def _gap(by_seed: Mapping[Any, Points], base: Mapping[Any, Points]) -> Curve | None:
  """Where both have values; None if they share no seed."""
  common = [s for s in by_seed if s in base]
  if not common:
    return None
  x, y_SxX = mean_curve([by_seed[s] for s in common])
  first, last = (f(base[s][0][i] for s in common) for f, i in ((max, 0), (min, -1)))
  inside = (x > first - 1e-6 * abs(first)) & (x < last + 1e-6 * abs(last))
  base_SxX = np.stack([np.interp(x, *base[s]) for s in common])
  return x[inside], (y_SxX - base_SxX)[:, inside]


def tau_curves(runs: Iterable[Records], prefix: str) -> Curves:
  """By kind, of the runs that were trained with diagnostics.every; nothing if none was."""
  measured = [records for records in runs if any(f"{prefix}/logit" in r for r in records)]
  return {
    kind: mean_curve([curve(records, "step", f"{prefix}/{kind}") for records in measured])
    for kind in (TAU_STYLES if measured else ())
  }


def read_taus(workdirs: Sequence[pathlib.Path], prefix: str) -> Curves:
  """Of runs that differ by seed."""
  if found := tau_curves([_records(workdir) for workdir in workdirs], prefix):
    return found
  where = ", ".join(map(str, workdirs))
  raise UserError(
    f"{where} has no {prefix}/logit on record: train it with --config.diagnostics.every=STEPS"
  )


def _records(workdir: pathlib.Path) -> list[dict[str, Any]]:
  path = workdir / METRICS_FILE
  if not path.is_file():
    raise UsageError(f"{workdir} has no records: there is no {METRICS_FILE}")
  return read_metrics(path)


def pruning_curves(runs: Sequence[Mapping[str, Any]]) -> Curves:
  """Eval loss by sparsity; `runs` as in prune.json."""
  by_method: dict[str, list[Points]] = {}
  for run in runs:
    by_method.setdefault(run["method"], []).append(curve(run["points"], "sparsity", "loss"))
  return {method: mean_curve(points) for method, points in by_method.items()}


# ---- drawing -------------------------------------------------------------------------------------

ONE_PANEL = (5.2, 3.5)


def files_of(target: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """What a figure is written to; the target may have one of the suffixes."""
  stem = target.name.removesuffix(".svg").removesuffix(".png")
  return target.with_name(f"{stem}.svg"), target.with_name(f"{stem}.png")


@contextlib.contextmanager
def figure(target: Target, size: tuple[float, float] = ONE_PANEL, panels: int = 1) -> Iterator[Any]:
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
    svg, png = files_of(target)
    with disk_errors(target):
      target.parent.mkdir(parents=True, exist_ok=True)
      fig.savefig(svg, metadata={"Date": None})
      fig.savefig(png, dpi=150)


def _draw(
  ax: Any, curves: Curves, styles: Mapping[str, tuple[str, str]] = STYLES, label: str = "{}"
) -> None:
  """Means over seeds, with bands that are their range."""
  styles = styles_of(curves, styles)
  for name, (x, y_SxX) in curves.items():
    colour, marker = styles[name]
    ax.plot(x, y_SxX.mean(0), color=colour, marker=marker, label=label.format(name))
    if len(y_SxX) > 1:
      ax.fill_between(x, y_SxX.min(0), y_SxX.max(0), color=colour, alpha=0.2, linewidth=0)


def _legend_above(ax: Any) -> None:
  """Above the axes, where it hides nothing; one for all panels."""
  ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def losses(target: Target, curves: Curves, x_label: str, gaps: Curves | None = None) -> None:
  """Eval loss; beside it the distances to AdamW, if they are given."""
  with figure(target, *(((9, 3.6), 2) if gaps else ())) as (ax, *beside):
    _draw(ax, curves)
    # The first evaluations are far above the rest, which is what one wants to see.
    every = [y_X for _, y_SxX in curves.values() for y_X in y_SxX]
    low, top = min(y_X.min() for y_X in every), max(np.median(y_X) for y_X in every)
    if top > low:
      ax.set_ylim(low - 0.1 * (top - low), low + 3 * (top - low))
    ax.set(xlabel=x_label, ylabel="eval loss (nats)")
    ax.legend(loc="upper right")
    if gaps:
      _draw_gaps(beside[0], gaps, x_label)


def gaps(target: Target, curves: Curves, x_label: str) -> None:
  """Distances to AdamW."""
  with figure(target) as (ax,):
    _draw_gaps(ax, curves, x_label)
    _legend_above(ax)


def _draw_gaps(ax: Any, curves: Curves, x_label: str) -> None:
  _draw(ax, curves)
  ax.axhline(0, color=INK, linewidth=1)
  ax.set(xlabel=x_label, ylabel=f"eval loss minus {ADAMW} (nats)")


def loss_against_rho(target: Target, curves: Curves, baseline: float) -> None:
  """`baseline` is AdamW's loss."""
  with figure(target) as (ax,):
    _draw(ax, curves)
    ax.axhline(baseline, color=INK, linestyle="--", linewidth=1, label=ADAMW)
    ax.set_xscale("log")
    tried = sorted({rho for rho_X, _ in curves.values() for rho in rho_X.tolist()})
    ax.set_xticks(tried, [f"{rho:g}" for rho in tried], minor=False)
    ax.minorticks_off()
    ax.set(xlabel="rho", ylabel="eval loss (nats)")
    _legend_above(ax)


class Row(NamedTuple):
  method: str
  mean: float
  low: float | None
  high: float | None
  paper: float | None  # the paper's difference


def differences(target: Target, rows: Sequence[Row], baseline: str = ADAMW) -> None:
  """One line per method: the difference to AdamW with its interval, the paper's as a cross."""
  styles = styles_of(row.method for row in rows)
  with figure(target, (6.4, 1.1 + 0.36 * len(rows))) as (ax,):
    for y, row in enumerate(rows):
      colour, marker = styles[row.method]
      if row.low is not None and row.high is not None:
        ax.plot([row.low, row.high], [y, y], color=colour, linewidth=2)
      ax.plot(row.mean, y, color=colour, marker=marker, markersize=6)
      if row.paper is not None:
        ax.plot(row.paper, y, color=MUTED, marker="x", markersize=6, linestyle="none")
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(rows)), [row.method for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    cross = "; x: the paper" if any(row.paper is not None for row in rows) else ""
    what = f"eval loss minus {baseline} (nats), {CONFIDENCE:.0%} interval"
    ax.set_xlabel(f"{what} (left is better){cross}")


def run_curve(target: Target, workdir: pathlib.Path) -> None:
  """Training and eval loss of one run over its steps."""
  records = _records(workdir)
  with figure(target, (6.4, 3.6)) as (ax,):
    ax.plot(*curve(records, "step", "train/loss"), label="training", color=SKY)
    ax.plot(*curve(records, "step", "eval/loss"), label="eval", color=INK, marker="o")
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.legend()


TAU_STYLES = {"logit": (RED, "s"), "func": (BLUE, "v"), "cross": (INK, "o")}


def taus(target: Target, runs: Mapping[str, Curves]) -> None:
  """`runs[label][logit|func|cross]`: a panel per run, as in Figures 2 and 4.

  A few values may be off the scale: where the two paths cancel, as at the start, they are huge.
  """
  later = [y for kinds in runs.values() for _, y_SxX in kinds.values() for y in y_SxX[:, 1:].flat]
  outer = np.percentile(later, (2, 98)) if later else ()
  low, high = min([-0.2, *outer]), max([1.2, *outer])
  with figure(target, (1.2 + 3.7 * len(runs), 3.4), len(runs)) as axes:
    for ax, (label, curves) in zip(axes, runs.items(), strict=True):
      _draw(ax, curves, TAU_STYLES, "$\\tau_\\mathrm{{{}}}$")
      ax.axhline(0, color=MUTED, linewidth=0.8)
      ax.set(xlabel="step", title=label)
      ax.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    axes[0].set_ylabel("share of the sharpness gradient")
    _legend_above(axes[0])


CLUSTER_STYLES = {"hard": (RED, "s"), "easy": (BLUE, "v")}


def trajectories(target: Target, steps: Sequence[int], clusters: Mapping[str, Any]) -> None:
  """Losses of hard and easy documents along a proxy's training: means, with bands of one standard
  deviation, and some documents as thin lines. `clusters` as nanosam/data/clusters.py describes."""
  with figure(target, (5.6, 3.8)) as (ax,):
    for name, found in clusters.items():
      colour, marker = CLUSTER_STYLES[name]
      mean, spread = found.mean_K, found.deviation_K
      label = f"{name}, {found.documents} documents"
      for losses in found.typical_losses:
        ax.plot(steps, losses, color=colour, linewidth=0.5)
      ax.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
      ax.plot(steps, mean, color=colour, marker=marker, linewidth=2, label=label)
    ax.set(xlabel="step of the proxy", ylabel="loss (nats per token)")
    ax.legend()


def landscape(target: Target, found: Mapping[str, Any]) -> None:
  """The loss along the top eigenvector with its parabola, and along random directions."""
  lines, value = found["landscape"], found["lambda_max"]["value"]
  x = np.asarray(lines["distance"])
  parabola = found["loss"] + lines["top_slope"] * x + 0.5 * value * x**2
  with figure(target, (5.6, 3.8)) as (ax,):
    for number, losses in enumerate(lines["random"]):
      label = None if number else "random directions"
      ax.plot(x, losses, color=SKY, marker="^", label=label)
    ax.plot(x, lines["top"], color=INK, marker="o", label="top eigenvector")
    label = f"its parabola, $\\lambda$ = {value:.3g}"
    ax.plot(x, parabola, color=RED, linestyle="--", label=label)
    ax.set(xlabel="distance from the trained parameters", ylabel="loss (nats per token)")
    ax.legend()


def density(target: Target, found: Mapping[str, Any]) -> None:
  """Of eigenvalues, on a logarithmic scale that ends below the height of a single one."""
  one = 1 / (found["parameters"] * found["width"] * np.sqrt(2 * np.pi))
  probes, steps = len(found["nodes"]), max(map(len, found["nodes"]))
  with figure(target, (5.6, 3.8)) as (ax,):
    ax.plot(
      found["eigenvalue"], found["density"], color=INK, label=f"{probes} probes, {steps} steps"
    )
    ax.axhline(one, color=RED, linestyle="--", label="height of one eigenvalue")
    ax.set_yscale("log")
    ax.set_ylim(one / 30, 3 * max(found["density"]))
    ax.set(xlabel="eigenvalue of H", ylabel="density")
    ax.legend()


def pruning(target: Target, runs: Sequence[Mapping[str, Any]]) -> None:
  """Eval loss by sparsity; `runs` as in prune.json."""
  with figure(target, (5.6, 3.8)) as (ax,):
    _draw(ax, {method: (100 * x, y_SxX) for method, (x, y_SxX) in pruning_curves(runs).items()})
    ax.set(xlabel="weights set to zero (%)", ylabel="eval loss (nats)")
    ax.legend()


def survival(target: Target, runs: BySeed, baseline: str, x_label: str) -> None:
  """The rise of the eval loss by the size of a change; beside it minus the baseline's, by seed."""
  base = runs.get(baseline, {})
  gaps = {m: g for m, by_seed in runs.items() if m != baseline and (g := _gap(by_seed, base))}
  with figure(target, *(((9, 3.6), 2) if gaps else ())) as (ax, *beside):
    _draw(ax, {method: mean_curve(by_seed.values()) for method, by_seed in runs.items()})
    ax.set(xlabel=x_label, ylabel="rise of the eval loss")
    ax.legend()
    for other in beside:
      _draw(other, gaps)
      other.axhline(0, color=INK, linewidth=1)
      other.set(xlabel=x_label, ylabel=f"rise minus {baseline}'s")
