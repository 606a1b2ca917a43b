"""Which models bear changes of their weights better, and how sure that is.

At each setting the runs are compared as nanosam.compare does it (nanosam/study/comparison.py), with
the eval loss after the change in place of their own, and again with its rise. Pairs share seed and
data order; noise has the same directions in all models, and fine-tuning the same batches.
"""

import argparse
import functools
import json
import math
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from nanosam import config as config_lib
from nanosam.curvature import changes, forgetting, pruning, survival
from nanosam.curvature.survival import AXES, FORGETTING, WEIGHTS, Survival
from nanosam.run.restore import RAW, load_run, open_run, stored_run
from nanosam.study import comparison, figures, tables
from nanosam.study.runs import DIVERGED, FINISHED, Run, find_runs, run_id, training_keys
from nanosam.study.tables import Table
from nanosam.system.command_line import numbers
from nanosam.system.errors import need
from nanosam.system.files import write_atomically, write_json

FINETUNED = "finetuned"  # the folder of the fine-tuning runs
Compare = Callable[[Sequence[Run]], comparison.Report]
Compared = dict[str, list[dict[str, Any]]]  # by part, for each setting: reports of loss and rise


# ---- what is asked for ---------------------------------------------------------------------------


def add_arguments(p: argparse.ArgumentParser) -> None:
  add = p.add_argument
  names = [*WEIGHTS, FORGETTING]
  usual = "all, forgetting only with --source"
  add("--parts", default="", help=f"comma-separated, of {', '.join(names)} (default {usual})")
  add(
    "--noise",
    type=numbers,
    default=(0.03, 0.1, 0.2, 0.4),
    help="its sizes, relative to the RMS of each matrix, comma-separated",
  )
  add("--draws", type=int, default=2, help="of each noise (default 2)")
  add("--bits", type=numbers, default=(8, 6, 5, 4, 3), help="to round to (default 8,6,5,4,3)")
  add("--group", type=int, default=0, help="inputs that share a scale (default 0: all)")
  add(
    "--sparsity",
    type=numbers,
    default=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    help="fractions of the weights to remove, comma-separated",
  )
  add(
    "--params",
    default="kernel|embed",
    help="regex of the weights to change (default 'kernel|embed': all matrices; 'kernel' leaves "
    "out the embeddings)",
  )
  add("--seed", type=int, default=0, help="of the noise (default 0)")
  add("--source", default="", help="data to fine-tune on, as data.source in a config")
  add("--finetune_steps", type=int, default=100, help="(default 100)")
  add("--finetune_learning_rate", type=float, default=1e-3, help="of AdamW (default 1e-3)")
  add("--by", default="opt.method", help="keys that form groups, as in nanosam.compare")
  add("--tune", default="", help="keys in which groups may differ, as in nanosam.compare")
  add("--baseline", default=comparison.ADAMW, help="the group to compare with")
  add("--confidence", type=float, default=comparison.CONFIDENCE)


def check(args: argparse.Namespace) -> None:
  """Refuses what cannot work, and completes the parts."""
  names = (*WEIGHTS, *((FORGETTING,) if args.source else ()))
  args.parts = tuple(args.parts.split(",")) if args.parts else names
  for name in args.parts:
    config_lib.lookup("part", name, dict.fromkeys((*WEIGHTS, FORGETTING)))
  forgets = FORGETTING in args.parts
  need(args.source or not forgets, "forgetting needs data to fine-tune on: --source=...")
  need(forgets or not args.source, "--source is for the part forgetting: add it to --parts")
  need(
    not forgets or args.weights == RAW,
    "forgetting starts from the raw weights: leave out --weights, or --source",
  )
  low, high = changes.BITS[0], changes.BITS[-1]
  for bits in args.bits:
    need(bits in changes.BITS, f"--bits={bits:g} must be a whole number from {low} to {high}")
  args.bits = tuple(sorted(map(int, set(args.bits)), reverse=True))
  args.noise, args.sparsity = sorted(set(args.noise)), sorted(set(args.sparsity))
  for name, least in {"draws": 1, "group": 0, "seed": 0, "finetune_steps": 1}.items():
    value = getattr(args, name)
    need(value >= least, f"--{name}={value} must be at least {least}")
  for scale in args.noise:
    need(math.isfinite(scale) and scale >= 0, f"--noise={scale:g} must not be negative")
  pruning.check(args)
  rate = args.finetune_learning_rate
  need(math.isfinite(rate) and rate > 0, f"--finetune_learning_rate={rate:g} must be positive")
  need(0 < args.confidence < 1, f"--confidence={args.confidence:g} must be between 0 and 1")


# ---- measuring -----------------------------------------------------------------------------------


def comparer(args: argparse.Namespace) -> Compare:
  return functools.partial(
    comparison.compare,
    by=args.by.split(","),
    tune=[key for key in args.tune.split(",") if key],
    baseline=args.baseline,
    confidence=args.confidence,
  )


def describe(workdir: str) -> Run:
  """A run without results."""
  c, environment = stored_run(epath.Path(workdir))
  keys = training_keys(config_lib.to_dict(c))
  nothing = np.zeros(1)
  return Run(pathlib.Path(workdir), keys, environment, [], 0, FINISHED, nothing, nothing + 1)


def with_losses(
  run: Run, step: int, nll_R: np.ndarray, weight_R: np.ndarray, documents: int
) -> Run:
  """The run as if this were its last evaluation."""
  loss = float(nll_R.sum() / weight_R.sum())
  eval_set = {**run.environment.get("eval_set", {}), "documents": documents}
  return run._replace(
    environment={**run.environment, "eval_set": eval_set},
    evals=[{"step": step, "eval/loss": loss}],
    step=step,
    state=FINISHED if math.isfinite(loss) else DIVERGED,
    nll_R=nll_R,
    weight_R=weight_R,
  )


def measure(
  workdirs: Sequence[str], args: argparse.Namespace, out: pathlib.Path, keep: bool = False
) -> tuple[list[Run], list[Survival]]:
  """Fine-tuning runs go to `out`; with `keep` measurements too, and those there are not repeated.

  What cannot be compared, or fine-tuned, is refused before anything is measured.
  """
  runs = [describe(workdir) for workdir in workdirs]
  zero, one = np.zeros(1), np.ones(1)
  comparer(args)([with_losses(run, 0, zero, one, 1) for run in runs])
  jobs = []
  for workdir, run in zip(workdirs, runs, strict=True):
    opened = open_run(workdir, args.step, args.weights)
    opened.checkpoints.close()
    path = out / "measured" / f"{run_id(run.keys)}.npz"
    stored = survival.load(path) if keep else None
    if stored and not _is_of(stored, workdir, opened.step, args):
      stored = None
    tuned = None
    if FORGETTING in args.parts and not stored:
      tuned = forgetting.finetuning(opened.config, workdir, opened.step, args)
      tuned.workdir = str(out / FINETUNED / run_id(config_lib.to_dict(tuned)))
      forgetting.finetune(tuned)
    jobs.append((workdir, str(opened.step), path, stored, tuned))
  found = []
  for workdir, step, path, stored, tuned in jobs:
    result = stored or survival.measure(
      load_run(workdir, step, weights=args.weights), workdir, args, tuned
    )
    if keep and not stored:
      path.parent.mkdir(parents=True, exist_ok=True)
      survival.save(result, path)
    found.append(result)
  return runs, found


def _is_of(stored: Survival, workdir: str, step: int, args: argparse.Namespace) -> bool:
  wanted = {name: getattr(args, name) for name in survival.SETTINGS}
  facts = {"workdir": workdir, "step": step, "weights": args.weights, "settings": wanted}
  return json.loads(json.dumps(facts)).items() <= stored.facts.items()


# ---- comparing -----------------------------------------------------------------------------------


def compare(
  runs: Sequence[Run], found: Sequence[Survival], args: argparse.Namespace
) -> tuple[Compared, list[str]]:
  """Reports in their JSON form (comparison.Report.to_json), and notes."""
  steps = [f"{s.facts['step']} of {s.facts['workdir']}" for s in found]
  apart = len({s.facts["step"] for s in found}) > 1
  notes = [f"warning: the models are of different steps: {', '.join(steps)}"] if apart else []
  compared: Compared = {}
  for name in found[0].parts:
    compared[name] = []
    for i, point in enumerate(found[0].parts[name].points):
      losses, rises = [], []
      for run, s in zip(runs, found, strict=True):
        base, points = s.parts[name]
        nll_R, weight_R = points[i].evaluation.nll_R, base.weight_R
        losses.append(with_losses(run, s.facts["step"], nll_R, weight_R, base.documents))
        rise_R = nll_R - base.nll_R
        rises.append(with_losses(run, s.facts["step"], rise_R, weight_R, base.documents))
      if any(run.state == FINISHED for run in losses):
        reports = {"loss": comparer(args)(losses), "rise": comparer(args)(rises)}
        notes += [note for report in reports.values() for note in report.notes]
        entry = {what: report.to_json() for what, report in reports.items()}
        compared[name].append({AXES[name].key: point.value, **entry})
  return compared, list(dict.fromkeys(notes))


def table(name: str, entries: Sequence[Mapping[str, Any]]) -> Table:
  """Of one part: a row for each setting and group."""
  number, key = tables.number, AXES[name].key
  baseline = entries[0]["loss"]["baseline"]
  paired = any(g["difference"] is not None for e in entries for g in e["loss"]["groups"])
  beside = [f"minus {baseline}", "interval"] if paired else []
  head = [key, "group", "seeds", "eval loss", *beside, "rise", *beside]
  rows = []
  for entry in entries:
    rises = {g["label"]: g for g in entry["rise"]["groups"]}
    for g in entry["loss"]["groups"]:
      row = [f"{entry[key]:g}", g["label"], str(len(g["losses"]))]
      for of, form in ((g, ".4f"), (rises[g["label"]], "+.4f")):
        row.append(number(of["loss"], form, "not finite"))
        if paired:
          row += [number(of["difference"], "+.4f"), tables.interval_text(of)]
      rows.append(row)
  return Table(head, rows)


def tables_of(compared: Compared) -> dict[str, Table]:
  return {name: table(name, entries) for name, entries in compared.items() if entries}


def covered(compared: Compared) -> list[str]:
  """What the intervals cover."""
  reports = [entry["rise"] for entries in compared.values() for entry in entries]
  return sorted({what for report in reports for what in tables.covered(report)})


def rises_by_seed(name: str, entries: Sequence[Mapping[str, Any]]) -> figures.BySeed:
  found: dict[str, dict[str, list[tuple[float, float]]]] = {}
  for entry in entries:
    for g in entry["rise"]["groups"]:
      for seed, rise in g["losses"].items():
        if math.isfinite(rise):
          members = found.setdefault(g["label"], {}).setdefault(seed, [])
          members.append((entry[AXES[name].key], rise))
  return {
    label: {seed: tuple(np.array(sorted(xy)).T) for seed, xy in members.items()}
    for label, members in found.items()
  }


def draw(compared: Compared, folder: pathlib.Path, baseline: str) -> list[str]:
  """One figure for each part; their names."""
  drawn = []
  for name, entries in compared.items():
    if curves := rises_by_seed(name, entries):
      figures.survival(folder / f"survive-{name}", curves, baseline, AXES[name].label)
      drawn.append(f"survive-{name}.png")
  return drawn


# ---- over folders of runs ------------------------------------------------------------------------


def study(
  folders: Sequence[pathlib.Path], args: argparse.Namespace, out: pathlib.Path, argv: list[str]
) -> None:
  """Of the runs below the folders those of each group's best setting, judged by eval loss.

  Writes results.json, table.md and figures to `out`. Every model's measurement stays there, so
  that the same command resumes.
  """
  found_runs, notes = find_runs(folders)
  best = comparer(args)(found_runs)
  workdirs = [str(run.path) for g in best.groups for run in g.best.runs.values()]
  runs, found = measure(workdirs, args, out, keep=True)
  compared, more = compare(runs, found, args)
  notes = list(dict.fromkeys([*notes, *best.notes, *more]))
  results = {"command": argv, "models": [s.to_json() for s in found], "comparison": compared}
  write_json(out / "results.json", {**results, "unchanged": best.to_json(), "notes": notes})
  lines = ["# What survives", "", f"`python {shlex.join(argv)}`", ""]
  for name, of_part in tables_of(compared).items():
    lines += [f"## {name}", "", f"![{name}](survive-{name}.svg)", "", *tables.markdown(of_part)]
  lines += [f"The interval covers {what}.\n" for what in covered(compared)]
  lines += [f"- {note}" for note in notes]
  write_atomically(out / "table.md", "\n".join([*lines, ""]).encode())
  draw(compared, out, args.baseline)
