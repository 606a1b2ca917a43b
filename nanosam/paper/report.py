"""A page about any folder of runs and results."""

import io
import json
import pathlib
from typing import Any

from nanosam.paper import measures, page, protocol
from nanosam.paper.family import Family, comparison_blocks, pruning_figure, tried
from nanosam.paper.findings import CONFIDENCE, difference_rows, published_table
from nanosam.paper.page import Block, Figure, Figures, Folded, Grid, Items, Page, Section, Text
from nanosam.paper.protocol import ADAMW, SCHEDULE, TUNED
from nanosam.study import comparable, plots, tables
from nanosam.study.runs import FINISHED, Run, all_runs, run_id
from nanosam.study.tables import Table
from nanosam.system.errors import UsageError, UserError

RESULTS_FILE = "results.json"


def write(folders: list[pathlib.Path], out: pathlib.Path) -> list[str]:
  """Writes report.html and report.md; returns what was left out, and why."""
  try:  # before all the work
    (out / page.FIGURES).mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UsageError(f"cannot write to --out={out}: {e.strerror}; name another folder") from e
  runs, twins, notes = read_runs(folders)
  experiments, more = read_experiments(folders)
  notes += more
  if not experiments and not any(r.state == FINISHED for r in runs):
    where = ", ".join(map(str, folders))
    reason = f" ({notes[0]}{'; ...' if len(notes) > 1 else ''})" if notes else ""
    raise UserError(f"nothing to report: no finished run and no {RESULTS_FILE} in {where}{reason}")
  families = make_families(runs, twins)
  title = f"NanoSAM: {', '.join(f.resolve().name for f in folders)}"
  sections = [
    summary(runs, families),
    *experiments,
    *(f.section() for f in shown(families)),
    Section("All runs", [Folded(f"{len(runs)} runs", [Grid("All runs", run_table(runs))])]),
    Section("Left out", [Items(notes)]),
  ]
  Page(title, sections).write(out)
  return notes


def read_runs(
  folders: list[pathlib.Path],
) -> tuple[list[Run], dict[pathlib.Path, Run], list[str]]:
  """Every run once; another copy of one (fig2 measures along the way) by the place of the first."""
  found, notes = all_runs(folders)
  runs: dict[str, Run] = {}
  twins = {}
  for run in sorted(found, key=lambda r: r.state != FINISHED):
    first = runs.setdefault(run_id(run.keys), run)
    if first is not run:
      twins[first.path] = run
      notes.append(f"{run.path} is the same run as {first.path}: it counts once")
  return list(runs.values()), twins, notes


def make_families(runs: list[Run], twins: dict[pathlib.Path, Run]) -> list[Family]:
  """Those with a finished run; each has a label of its own."""
  found = [
    f
    for f in comparable.families(runs, {"opt.method", SCHEDULE, *TUNED})
    if any(r.state == FINISHED for r in f)
  ]
  labels = label_families(found)
  families = [Family(f"runs{n}", labels[n], f, twins) for n, f in enumerate(found)]
  return sorted(families, key=lambda f: -len(f.groups))


def label_families(families: list[list[Run]]) -> list[str]:
  """Width and steps, and what else it takes to tell them apart."""
  first = [f[0].keys for f in families]  # of a run that perturbs, if there is one
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
    f"{label}, data {f[0].environment.get('data')}" if labels.count(label) > 1 else label
    for label, f in zip(labels, families, strict=True)
  ]


def shown(families: list[Family]) -> list[Family]:
  """Where there is something to compare; without any, all."""
  return [f for f in families if len(f.groups) > 1] or families


def summary(runs: list[Run], families: list[Family]) -> Section:
  finished = [r for r in runs if r.state == FINISHED]
  methods = sorted({r.keys["opt.method"] for r in finished})
  text = f"{len(finished)} finished runs; methods: {', '.join(methods)}."
  rows = []
  for family in shown(families):
    best = min(family.report.to_json()["groups"], key=lambda g: g["loss"])
    i = tables.interval(best)
    rows.append(
      [
        *(family.label, best["label"], f"{best['loss']:.4f}"),
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


# ---- What reproduce.py has written ---------------------------------------------------------------


def read_experiments(folders: list[pathlib.Path]) -> tuple[list[Section], list[str]]:
  """A section for each results.json below the folders, and a line for each that cannot be used."""
  sections, notes = [], []
  paths = {p for f in folders for p in f.rglob(RESULTS_FILE)}
  tables_first = sorted(paths, key=lambda p: (p.parent.name.startswith("fig"), p))
  for number, path in enumerate(tables_first):
    try:
      sections.append(experiment(json.loads(path.read_text()), f"experiment{number}"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
      reason = " ".join(f"{type(e).__name__} {e}".split())
      notes.append(
        f"left out {path}: not what scripts/reproduce.py writes ({reason}); make it again with "
        "--stage=report"
      )
  return sections, notes


def experiment(results: dict[str, Any], name: str) -> Section:
  title, scale = results["experiment"], results["scale"]
  stands_for = {s.label: s.paper for s in protocol.EXPERIMENTS[title].settings[scale]}
  published = results["paper"] if isinstance(results["paper"], dict) else {}
  blocks: list[Block] = []
  if isinstance(results["paper"], str):
    blocks.append(Text(results["paper"]))
  for number, (label, report) in enumerate(results["settings"].items()):
    paper = published.get(stands_for.get(label, ""), {})
    more = [
      Folded(what, comparison_blocks(what, extra))
      for what, extra in results["more"].get(label, {}).items()
    ]
    caption = "Eval loss" + (f", beside the paper's ({stands_for[label]})" if paper else "")
    losses: list[Block] = comparison_blocks(caption, report, paper)
    if title.startswith("fig"):
      where = Text("Its curves, if it has any, are among those of the runs below.")
      losses = [where, Folded(caption, losses)]
    else:
      losses.append(Figures(differences_figure(report, paper, f"{name}-{number}")))
    measured = measured_blocks(results, label, stands_for.get(label, ""), f"{name}-{number}")
    blocks.append(Section(label, [*losses, *measured, *more, *tried(report)]))
  if published and not any(stands_for.values()):
    blocks.append(Grid("The paper's losses", published_table(published)))
  return Section(f"{title}, {scale}", blocks)


def measured_blocks(results: dict[str, Any], label: str, stands_for: str, name: str) -> list[Block]:
  """Of final models; the paper's numbers are of its own scale."""
  found = results.get("measured", {}).get(label, {})
  paper = (results.get("paper_sharpness") or {}).get(stands_for, {})
  caption = "Sharpness of the final models" + (", in brackets the paper's" if paper else "")
  return [
    Grid(caption, measures.sharpness_table(found.get("sharpness", {}), paper)),
    Figures(pruning_figure(found.get("prune", {}), name)),
  ]


def differences_figure(
  report: dict[str, Any], paper: dict[str, float | None], name: str
) -> list[Figure]:
  rows = difference_rows(report, paper)
  if not rows:
    return []
  plots.differences(buffer := io.StringIO(), rows, CONFIDENCE)
  values = Table(
    ["method", f"minus {ADAMW}", "low", "high", "paper"],
    [[r.method, *(tables.number(x, "+.4f") for x in r[1:])] for r in rows],
  )
  caption = f"Eval loss minus {ADAMW}'s"
  return [Figure(f"{name}-differences", caption, buffer.getvalue(), values)]
