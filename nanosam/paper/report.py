"""A page about any folder of runs and results."""

import json
import pathlib

from nanosam.paper import page
from nanosam.paper.experiments import ADAMW
from nanosam.paper.findings import RESULTS_FILE, experiment_blocks
from nanosam.paper.page import Folded, Grid, Items, Section, Text
from nanosam.paper.protocol import SCHEDULE, TUNED
from nanosam.paper.run_set import RunSet
from nanosam.study import comparable, tables
from nanosam.study.runs import FINISHED, Run, all_runs, run_id
from nanosam.study.tables import Table
from nanosam.system.errors import UsageError, UserError


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
  sections = [
    summary(runs, sets),
    *experiments,
    *(s.section() for s in shown(sets)),
    Section("All runs", [Folded(f"{len(runs)} runs", [Grid("All runs", run_table(runs))])]),
    Section("Left out", [Items(notes)]),
  ]
  page.write(out, title, sections)
  return notes


def read_runs(
  folders: list[pathlib.Path],
) -> tuple[list[Run], dict[pathlib.Path, Run], list[str]]:
  """Every run once; another copy of one (fig2 measures taus) by the workdir of the first; notes."""
  found, notes = all_runs(folders)
  runs: dict[str, Run] = {}
  copies = {}
  for run in sorted(found, key=lambda r: r.state != FINISHED):
    first = runs.setdefault(run_id(run.keys), run)
    if first is not run:
      copies[first.path] = run
      notes.append(f"{run.path} is the same run as {first.path}: it counts once")
  return list(runs.values()), copies, notes


def make_sets(runs: list[Run], copies: dict[pathlib.Path, Run]) -> list[RunSet]:
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


def summary(runs: list[Run], sets: list[RunSet]) -> Section:
  finished = [r for r in runs if r.state == FINISHED]
  methods = sorted({r.keys["opt.method"] for r in finished})
  text = f"{len(finished)} finished runs; methods: {', '.join(methods)}."
  rows = []
  for s in shown(sets):
    best = min(s.report.to_json()["groups"], key=lambda g: g["loss"])
    i = tables.interval(best)
    rows.append(
      [
        *(s.label, best["label"], f"{best['loss']:.4f}"),
        tables.number(best["difference"], "+.4f"),
        f"{i['low']:+.4f} to {i['high']:+.4f}" if i else "",
      ]
    )
  head = ["setting", "best method", "eval loss", f"minus {ADAMW}", "interval"]
  return Section("In short", [Text(text), Grid("Best of each setting", Table(head, rows))])


def run_table(runs: list[Run]) -> Table:
  rows = []
  for run in sorted(runs, key=lambda r: (r.keys["opt.method"], str(r.path))):
    last = run.evals[-1] if run.evals else {}
    rows.append(
      [
        *(run.path.name, run.keys["opt.method"], str(run.keys["seed"])),
        tables.settings({k: run.keys[k] for k in TUNED if k in run.keys}),
        f"{run.step} of {run.steps}",
        run.state,
        tables.number(last.get("eval/loss"), ".4f"),
        tables.number(last.get("eval/loss_sem"), ".4f"),
        tables.number(last.get("eval/bits_per_byte"), ".4f"),
      ]
    )
  head = ["run", "method", "seed", "settings", "steps", "state", "eval loss", "sem", "bits/byte"]
  return Table(head, rows)


def read_experiments(folders: list[pathlib.Path]) -> tuple[list[Section], list[str]]:
  """A section for each results.json below the folders, and a line for each that cannot be used."""
  sections, notes = [], []
  paths = {p for f in folders for p in f.rglob(RESULTS_FILE)}
  tables_first = sorted(paths, key=lambda p: (p.parent.name.startswith("fig"), p))
  where = "Its curves, if it has any, are among those of the runs below."
  for number, path in enumerate(tables_first):
    try:
      results = json.loads(path.read_text())
      blocks = experiment_blocks(results, f"experiment{number}")
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
