"""A page about any folder of runs and results."""

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanosam import __version__
from nanosam.paper import findings, measures, page
from nanosam.paper.experiments import ADAMW
from nanosam.paper.findings import RESULTS_FILE
from nanosam.paper.page import Figure, Figures, Folded, Grid, Items, Section, Text
from nanosam.paper.protocol import SCHEDULE, TUNED, tuned_keys
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.study import comparable, comparison, figures, tables
from nanosam.study.runs import FINISHED, Run, all_runs, find_copies
from nanosam.study.tables import Table
from nanosam.system.errors import UsageError, UserError

Copies = Mapping[pathlib.Path, Sequence[pathlib.Path]]  # of a run, by its workdir
ONE_SEED = (
  "An interval that covers other text only is of one seed: another seed may give another sign."
)
EQUAL_COST = (
  "At equal compute or time a method that costs more is earlier in its learning-rate schedule: for "
  "a fair race train it with a schedule for that budget."
)


@dataclasses.dataclass
class RunSet:
  """Runs that differ only in method, tuned keys and seeds, and how they compare."""

  name: str  # prefix of its figures' names
  label: str
  runs: Sequence[Run]
  copies: Copies

  def __post_init__(self) -> None:
    self.report = comparison.compare(self.runs, tune=tuned_keys(self.runs))
    self.groups = [g for g in self.report.groups if math.isfinite(g.mean)]

  @functools.cached_property
  def records(self) -> dict[pathlib.Path, list[dict[str, Any]]]:
    """Every record of the runs that the figures show, by workdir."""
    return {
      run.path: [
        record
        for place in (run.path, *self.copies.get(run.path, []))
        for record in read_metrics(place / METRICS_FILE)
      ]
      for g in self.groups
      for run in g.best.runs.values()
    }

  def section(self) -> Section:
    report = self.report.to_json()
    sharpness = measures.sharpness_table(measures.collect(self.groups, "sharpness"), {})
    pruned = findings.pruning_figure(measures.collect(self.groups, "prune"), self.name)
    return Section(
      f"Runs: {self.label}",
      [
        *findings.comparison_blocks("Eval loss after the last step", report),
        Figures([*self.curve_figures(), *findings.rho_figure(self.report, self.name)]),
        Text(EQUAL_COST) if self.report.group(ADAMW) else Text(""),
        Grid("Cost, as measured while the runs were trained", self.cost()),
        Section("Parts of the curvature over training", [Figures([*self.tau_figures()])]),
        Section("Final models", [Grid("Sharpness", sharpness), Figures(pruned)]),
        findings.tried_block(report),
        Folded("How they were trained", [Grid("How they were trained", self.facts())]),
      ],
    )

  def curve_figures(self) -> Iterator[Figure]:
    """Of each method's best setting."""
    for axis in comparison.VIEWS.values():
      losses, gaps = figures.best_curves(self.groups, axis.key)
      yield Figure(
        f"{self.name}-loss-{axis.key}",
        f"Eval loss (nats) against {axis.label}{figures.bands(losses)}",
        findings.values_of(axis.label, losses, ".4f"),
        functools.partial(figures.losses, curves=losses, x_label=axis.label),
      )
      if gaps:
        yield Figure(
          f"{self.name}-gap-{axis.key}",
          f"Eval loss minus {ADAMW}'s (nats) at equal {axis.label}, paired by seed"
          + figures.bands(gaps),
          findings.values_of(axis.label, gaps, "+.4f"),
          functools.partial(figures.gaps, curves=gaps, x_label=axis.label),
        )

  def tau_figures(self) -> Iterator[Figure]:
    for g in self.groups:
      records = [self.records[run.path] for run in g.best.runs.values()]
      for prefix, what in (("tau", "along g"), ("tau_precond", "along M⁻¹g")):
        if curves := figures.tau_curves(records, prefix):
          yield Figure(
            f"{self.name}-{prefix}-{g.label}",
            f"tau of {g.label} over training, {what}{figures.bands(curves)}",
            findings.values_of("steps", curves, ".4f"),
            functools.partial(figures.taus, runs={g.label: curves}),
          )

  def cost(self) -> Table:
    """Of each method's best setting."""
    found = {}
    for g in self.groups:
      runs = list(g.best.runs.values())
      ends = [(run.evals[-1]["compute"] - run.before, run.evals[-1]["step"]) for run in runs]
      flops = statistics.fmean(compute / step for compute, step in ends)
      records = [r for run in runs for r in self.records[run.path] if "perf/step_time" in r]
      seconds, speed = (
        statistics.median([r[f"perf/{name}"] for r in records]) if records else math.nan
        for name in ("step_time", "tokens_per_sec")
      )
      found[g.label] = flops, seconds, speed, g.spent("time") / 60
    base_flops, base_seconds, *_ = found.get(ADAMW, [math.nan] * 4)
    rows = []
    for method, (flops, seconds, speed, minutes) in found.items():
      row = [(flops, ".3g"), (flops / base_flops, ".2f"), (seconds, ".3g")]
      row += [(seconds / base_seconds, ".2f"), (speed, ".0f"), (minutes, ".1f")]
      rows.append([method, *(tables.number(value, form) for value, form in row)])
    head = ["method", "FLOPs a step", f"to {ADAMW}", "seconds a step", f"to {ADAMW}"]
    return Table([*head, "tokens a second", "minutes in all"], rows)

  def facts(self) -> Table:
    """What the runs share, or every value that occurs."""
    keys = "model.D model.N model.H model.L batch_size opt.num_train_steps opt.base".split()
    keys += ["model.dtype", "data.source", "data.weights"]
    facts = {k: {tables.show(r.keys[k]) for r in self.runs} for k in keys}
    for name in ("parameters", "data", "weights", "eval_set", "devices", "git_commit"):
      facts[name] = {json.dumps(r.environment.get(name)) for r in self.runs}
    return Table(["what", "value"], [[k, "; ".join(sorted(v))] for k, v in facts.items()])


def write(folders: list[pathlib.Path], out: pathlib.Path) -> list[str]:
  """Writes report.html and report.md; returns notes on what was left out, and why."""
  try:  # before all the work
    (out / page.FIGURES).mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UsageError(f"cannot write to --out={out}: {e.strerror}; name another folder") from e
  runs, copies, notes = read_runs(folders)
  experiments, more = read_experiments(folders)
  notes += more
  if not experiments and not any(r.state == FINISHED for r in runs):
    where = ", ".join(map(str, folders))
    reason = f" ({notes[0]}{'; ...' if len(notes) > 1 else ''})" if notes else ""
    raise UserError(f"nothing to report: no finished run and no {RESULTS_FILE} in {where}{reason}")
  sets = make_sets(runs, copies)
  title = f"NanoSAM: {', '.join(f.resolve().name for f in folders)}"
  made = f"Made on {datetime.date.today()} by NanoSAM {__version__}."
  files = f"Every table and figure is in {page.TABLES}/ as CSV and LaTeX."
  sections = [
    summary(runs, sets, f"{made} {files}"),
    *experiments,
    *(s.section() for s in shown(sets)),
    Section("All runs", [Folded(f"{len(runs)} runs", [Grid("All runs", run_table(runs))])]),
    Section("Left out", [Items(notes)]),
  ]
  page.write(out, title, sections)
  return notes


def read_runs(folders: list[pathlib.Path]) -> tuple[list[Run], Copies, list[str]]:
  """Every run once; other workdirs of it (fig2 measures taus); notes."""
  found, notes = all_runs(folders)
  found.sort(key=lambda r: r.state != FINISHED)
  copies: dict[pathlib.Path, list[pathlib.Path]] = {}
  for first, other in find_copies(found):
    copies.setdefault(first.path, []).append(other.path)
    notes.append(f"{other.path} is the same run as {first.path}: it counts once")
  others = {path for paths in copies.values() for path in paths}
  return [run for run in found if run.path not in others], copies, notes


def make_sets(runs: list[Run], copies: Copies) -> list[RunSet]:
  """Those with a finished run; each has a label of its own."""
  found = [
    members
    for members in comparable.comparable_sets(runs, {"opt.method", SCHEDULE, *TUNED})
    if any(r.state == FINISHED for r in members)
  ]
  labels = label_sets(found)
  sets = [RunSet(f"runs{n}", labels[n], members, copies) for n, members in enumerate(found)]
  return sorted(sets, key=lambda s: -len(s.groups))


def label_sets(sets: list[list[Run]]) -> list[str]:
  """Width and steps, and what else it takes to tell them apart."""
  first = [members[0].keys for members in sets]  # of a run that perturbs, if there is one
  names = ["model.D", "opt.num_train_steps"]
  ignored = {"opt.method", SCHEDULE, *TUNED, *comparable.REPLICATE, *comparable.FOLLOWS, *names}

  def distinct() -> int:
    return len({tuple(str(keys.get(k)) for k in names) for keys in first})

  for key in sorted({k for keys in first for k in keys} - ignored - comparable.NOT_COMPARED):
    before = distinct()
    names.append(key)
    if distinct() == before:
      names.pop()
  labels = [tables.settings({k: keys[k] for k in names if k in keys}) for keys in first]
  return [
    f"{label}, data {s[0].environment.get('data')}" if labels.count(label) > 1 else label
    for label, s in zip(labels, sets, strict=True)
  ]


def shown(sets: list[RunSet]) -> list[RunSet]:
  """Where there is something to compare; if nowhere, all."""
  return [s for s in sets if len(s.groups) > 1] or sets


def provenance(runs: list[Run]) -> Table:
  """On what, with what and when the runs were made: what they share, or every value that occurs."""

  def devices(r: Run) -> str:
    found = r.environment.get("devices") or {}
    return f"{found.get('count')} x {found.get('kind')}" if found else ""

  def packages(r: Run) -> str:
    found = r.environment.get("packages") or {}
    return ", ".join(f"{k} {found[k]}" for k in ("nanosam", "jax") if found.get(k))

  facts: dict[str, Callable[[Run], Any]] = {
    "data": lambda r: f"{r.keys['data.source']} ({r.environment.get('data')})",
    "eval set": lambda r: tables.settings(r.environment.get("eval_set") or {}),
    "commit": lambda r: r.environment.get("git_commit"),
    "hardware": devices,
    "packages": packages,
    "started": lambda r: r.environment.get("started", "")[:10],
  }
  rows = []
  for name, fact in facts.items():
    values = sorted({str(fact(r) or "not recorded") for r in runs})
    shown = values if len(values) < 4 else [*values[:2], f"and {len(values) - 2} more"]
    rows.append([name, "; ".join(shown)])
  return Table(["what", "value"], rows)


def summary(runs: list[Run], sets: list[RunSet], made: str) -> Section:
  finished = [r for r in runs if r.state == FINISHED]
  methods = sorted({r.keys["opt.method"] for r in finished})
  text = f"{len(finished)} finished runs; methods: {', '.join(methods)}. {made}"
  rows = []
  for s in shown(sets):
    best = min(s.report.to_json()["groups"], key=lambda g: g["loss"])
    difference = tables.number(best["difference"], "+.4f")
    loss, interval = f"{best['loss']:.4f}", tables.interval_text(best)
    beware = "; ".join(best["warnings"])
    row = [s.label, best["label"], loss, str(len(best["losses"])), difference, interval]
    rows.append([*row, tables.covers(best), beware])
  head = ["setting", "best method", tables.LOSS, "seeds", f"minus {ADAMW}"]
  head += [f"{comparison.CONFIDENCE:.0%} interval".replace("%", " %"), "covers", "beware"]
  blocks: list[page.Block] = [Text(text), Grid("Best of each setting", Table(head, rows))]
  if any(row[-2] == tables.COVERS["units"] for row in rows):
    blocks.append(Text(ONE_SEED))
  if finished:
    blocks.append(Grid("What was run", provenance(finished)))
  return Section("In short", blocks)


def run_table(runs: list[Run]) -> Table:
  rows, started = [], any(run.lineage for run in runs)
  for run in sorted(runs, key=lambda r: (r.keys["opt.method"], str(r.path))):
    settings = tables.settings({k: run.keys[k] for k in TUNED if k in run.keys})
    names = ("loss", "loss_sem", "bits_per_byte")
    last = [(run.evals[-1] if run.evals else {}).get(f"eval/{name}") for name in names]
    rows.append(
      [
        *(run.path.name, run.keys["opt.method"], str(run.keys["seed"]), settings),
        *(f"{run.step} of {run.steps}", run.state),
        *(tables.number(x, ".4f") for x in last),
        *([run.lineage] if started else []),
      ]
    )
  head = ["run", "method", "seed", "settings", "steps", "state", "eval loss", "sem", "bits/byte"]
  return Table([*head, *(["started from"] if started else [])], rows)


def read_experiments(folders: list[pathlib.Path]) -> tuple[list[Section], list[str]]:
  """A section for each results.json below the folders, and a line for each that cannot be used."""
  sections, notes = [], []
  paths = {p for f in folders for p in f.rglob(RESULTS_FILE)}
  tables_first = sorted(paths, key=lambda p: (p.parent.name.startswith("fig"), p))
  where = "Its curves, if it has any, are among those of the runs below."
  for number, path in enumerate(tables_first):
    try:
      results = json.loads(path.read_text())
      blocks = findings.experiment_blocks(results, f"experiment{number}")
      if results["experiment"].startswith("fig"):
        blocks.append(Text(where))
      sections.append(Section(f"{results['experiment']}, {results['scale']}", blocks))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
      reason = " ".join(f"{type(e).__name__} {e}".split())
      notes.append(
        f"left out {path}: not what scripts/reproduce.py writes ({reason}); write it again with "
        "--stage=report"
      )
  return sections, notes
