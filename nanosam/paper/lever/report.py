"""Measures the final models of the data lever, and writes what came out."""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanosam.data import clusters
from nanosam.data.sources import StoreSource, eval_set, source_of
from nanosam.data.weights import read_weights
from nanosam.paper import page
from nanosam.paper.findings import RESULTS_FILE, comparison_blocks, differences_figure
from nanosam.paper.lever.study import ARMS, MAIN, OPTIMIZERS, RECIPES, TUNING_SEED, Lever
from nanosam.paper.page import Grid, Section, Text
from nanosam.paper.regimes import final_loss
from nanosam.run import restore
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded
from nanosam.run.scoring import Scorer, document_losses
from nanosam.study import comparison, paired, runs, tables
from nanosam.study.tables import Table
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically, write_json

MEASURED = "lever.json"  # in a run's workdir
KINDS = ("hard", "easy", "other")


class Validation:
  """The validation documents of the store, and which of them are hard."""

  def __init__(self, lever: Lever):
    self._rows = lever.settings.measured_rows
    weights = read_weights(str(lever.file(MAIN)))
    proxy = weights.facts["proxy"]["workdir"]
    found = [self.losses(restore.load_run(proxy, str(step))) for step in weights.facts["steps"]]
    loss_DxK = np.stack([loss for loss, _ in found], axis=1)
    centroids = [weights.facts["centroids"][name] for name in ("easy", "hard")]
    self.hard_D = clusters.nearest(loss_DxK, np.asarray(centroids))
    if self.hard_D.all() or not self.hard_D.any():
      raise UserError(
        f"all {len(self.hard_D)} validation documents are in one cluster: raise measured_rows, so "
        "that there are more of them"
      )

  def losses(self, run: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss and tokens of each document that ends within the rows."""
    source = run.source
    assert isinstance(source, StoreSource)
    split = source.store.split("validation")
    scorer = Scorer(run.model, split, source.tokenizer, run.config, run.mesh)
    loss_D = document_losses(scorer, run.params, self._rows)
    return loss_D, split.documents()[: len(loss_D), 0] - 1


def measure(lever: Lever, say: Callable[[str], None]) -> None:
  """Every finished run of the verdict, unless that has been done."""
  jobs = [j for j in lever.jobs("verdict") if (r := j.stored()) and r.state == runs.FINISHED]
  todo = [job for job in jobs if not (job.workdir / MEASURED).exists()]
  validation = Validation(lever) if todo else None
  for number, job in enumerate(todo, 1):
    say(f"[{number}/{len(todo)}] measuring {job.id}")
    assert validation
    run = restore.load_run(job.workdir)
    loss_D, tokens_D = validation.losses(run)
    found = {
      name: float(np.average(loss_D[mine], weights=tokens_D[mine]))
      for name, mine in (("hard", validation.hard_D), ("easy", ~validation.hard_D))
    }
    data = eval_set(source_of(run.config.data, lever.other), run.config)
    evaluator = Evaluator(run.model, data, run.config.eval_batch_size, run.mesh)
    found["other"] = evaluator(run.params).loss
    write_json(job.workdir / MEASURED, {**found, "hard_documents": int(validation.hard_D.sum())})


def measured_differences(report: comparison.Report) -> dict[str, Any]:
  """By weights and kind of text: the mean difference to no weights, paired by seed."""
  base = report.group("none")
  found: dict[str, Any] = {}
  for group in report.groups:
    pairs = [(r, base.best.runs[s]) for s, r in group.best.runs.items() if s in base.best.runs]  # type: ignore[union-attr]
    both = [(_measured(a), _measured(b)) for a, b in pairs]
    if not both or not all(a and b for a, b in both):
      continue
    found[group.label] = {}
    for kind in KINDS:
      delta_S = np.array([a[kind] - b[kind] for a, b in both])
      interval = paired.over_seeds(delta_S, comparison.CONFIDENCE)
      found[group.label][kind] = {
        "loss": float(np.mean([a[kind] for a, _ in both])),
        "difference": float(delta_S.mean()),
        "interval": interval._asdict() if interval else None,
      }
  return found


def _measured(run: runs.Run) -> dict[str, float]:
  file = run.path / MEASURED
  return json.loads(file.read_text()) if file.exists() else {}


def write_report(lever: Lever, argv: list[str]) -> None:
  """results.json, table.md and a figure for each optimizer."""
  lever.out.mkdir(parents=True, exist_ok=True)
  results: dict[str, Any] = {"experiment": "lever", "command": argv}
  results["weights"] = {
    name: {k: facts[k] for k in ("clusters", "chosen", "steps", "flops", "hash")}
    for name in RECIPES
    if lever.file(name).exists() and (facts := read_weights(str(lever.file(name))).facts)
  }
  results["steps_paid"] = {
    arm.label: lever.paid(arm) for arm in ARMS if arm.weights in results["weights"]
  }
  for optimizer in OPTIMIZERS:
    reports = {stage: lever.verdict(optimizer, stage) for stage in ("verdict", "compute")}
    found: dict[str, Any] = {stage: r.to_json() for stage, r in reports.items() if r}
    if report := reports["verdict"]:
      found["measured"] = measured_differences(report)
      found["power"] = {
        g.label: paired.detectable(g.difference.deviation, g.difference.pairs)
        for g in report.groups
        if g.difference and g.difference.pairs > 1
      }
      for figure in differences_figure(found["verdict"], {}):
        figure.draw(lever.out / f"differences-{optimizer}")
    results[optimizer] = found
  results["tuning"] = {
    arm.label: [{"run": job.id, "loss": final_loss(job)} for job in lever.trials(arm)[0]]
    for arm in ARMS
  }
  write_json(lever.out / RESULTS_FILE, results)
  write_atomically(lever.out / "table.md", table(results).encode())
  print(f"written: {lever.out}/{RESULTS_FILE} and table.md", flush=True)


def table(results: Mapping[str, Any]) -> str:
  titles = {
    "verdict": "equal steps, fresh seeds",
    "compute": "equal compute, proxy and scoring included",
  }
  sections = [
    Section(
      optimizer,
      [
        *(
          Section(title, comparison_blocks("Eval loss", results[optimizer][stage]))
          for stage, title in titles.items()
          if stage in results[optimizer]
        ),
        Grid("Final models, minus none (by seed)", measured_table(results[optimizer])),
        Grid("What the verdict could have told (power 0.8)", power_table(results[optimizer])),
      ],
    )
    for optimizer in OPTIMIZERS
  ]
  tuning = [
    [label, trial["run"], tables.number(trial["loss"], ".4f", "not finished or diverged")]
    for label, trials in results["tuning"].items()
    for trial in trials
  ]
  return page.to_markdown(
    "The data lever",
    [
      Text(f"`python {shlex.join(results['command'])}`"),
      Grid("Weights", weights_table(results["weights"])),
      Grid(
        "Steps that the proxy and the scoring would have bought; an arm that has none left is not "
        "compared at equal compute",
        Table(["arm", "steps"], [[k, f"{v:.0f}"] for k, v in results["steps_paid"].items()]),
      ),
      *sections,
      Section(
        f"Tuning, seed {TUNING_SEED}",
        [Grid("Every trial", Table(["arm", "run", "eval loss"], tuning))],
      ),
    ],
  )


def weights_table(weights: Mapping[str, Any]) -> Table:
  head = ["weights", "hard documents", "hard tokens", "repeated", "of tokens", "at steps", "FLOPs"]
  rows = []
  for name, facts in weights.items():
    hard, easy = facts["clusters"]["hard"], facts["clusters"]["easy"]
    share = (hard[k] / (hard[k] + easy[k]) for k in ("documents", "tokens"))
    row = [name, *(f"{x:.1%}" for x in share), str(facts["chosen"]["documents"])]
    row += [str(facts["chosen"]["tokens"]), f"{facts['steps'][0]} to {facts['steps'][-1]}"]
    rows.append([*row, f"{sum(facts['flops'].values()):.3g}"])
  return Table(head, rows)


def measured_table(found: Mapping[str, Any]) -> Table:
  rows = []
  for label, kinds in found.get("measured", {}).items():
    row = [label]
    for kind in KINDS:
      x, i = kinds[kind], kinds[kind]["interval"]
      around = f" ({i['low']:+.4f} to {i['high']:+.4f})" if i and label != "none" else ""
      own = label == "none"
      row.append(f"{x['loss']:.4f}" if own else f"{x['difference']:+.4f}{around}")
    rows.append(row)
  return Table(["weights", "hard documents", "easy documents", "another corpus"], rows)


def power_table(found: Mapping[str, Any]) -> Table:
  rows = [[label, f"{value:.4f}"] for label, value in found.get("power", {}).items()]
  return Table(["weights", "detectable difference"], rows)
