"""Is a sharpness-aware method better than AdamW, tuned as hard, and where? Three regimes.

Stages of a regime (results/mini2/protocol.md has the reasons; it was written before the runs):
  pilot    AdamW and PrecondFuncSAM at one setting on three seeds: how many seeds a verdict needs.
  tuning   every method by coordinate search on a seed of its own, with the same number of trials:
           first rho (AdamW: weight decay), then learning rate, then weight decay. Where the best
           value is at the edge of its grid, the grid is extended until it is not.
  verdict  every method at its best setting on fresh seeds, shared by all methods.
  compute  the same with the steps that AdamW's compute buys, under a schedule for that length.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanosam.data.sources import source_of
from nanosam.paper import page, stages
from nanosam.paper.experiments import ADAMW
from nanosam.paper.findings import RESULTS_FILE, comparison_blocks, differences_figure
from nanosam.paper.page import Grid, Section, Text
from nanosam.paper.protocol import DECAY, PEAK, RHO, ROOT, STEPS, step_flops
from nanosam.paper.stages import ENDED
from nanosam.study import backends, comparison, paired, runs, sweeps, tables
from nanosam.study.sweeps import Job, Overrides
from nanosam.study.tables import Table
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically, write_json

METHOD, SIGN = "opt.method", "opt.momentum_sign"
STAGES = ("pilot", "tuning", "verdict", "compute")
TUNING_SEED, PILOT_SEEDS = 11, (21, 22, 23)
Point = dict[str, float]  # values of the tuned keys


class Arm(NamedTuple):
  """A method as it is compared."""

  label: str
  method: str
  sign: float = 1.0  # of the momentum's direction

  @property
  def overrides(self) -> Overrides:
    return {} if self.sign == 1.0 else {SIGN: self.sign}


ARMS = (
  *(Arm(m, m) for m in (ADAMW, "sam", "func_sam", "precond_sam", "precond_func_sam")),
  Arm("momentum_func_sam, ahead", "momentum_func_sam"),
  Arm("momentum_func_sam, back", "momentum_func_sam", -1.0),  # as Momentum-SAM's authors
)


class Regime(NamedTuple):
  arguments: dict[str, Any]  # of configs/mini.py
  learning_rate: float  # where AdamW's search begins
  decays: tuple[float, ...]  # the pilot has the second of these, and of the rhos
  rhos: tuple[float, ...]  # an RMS of eps per coordinate of 3e-5, 1e-4, 3e-4 and 1e-3


SHARED: Overrides = {"model.N": 2, "model.H": 2, "opt.final_learning_rate": 0.0, "eval_steps": 32}
REGIMES = {
  "limited": Regime(  # 218 thousand tokens, 19 epochs
    {"width": 64, "length": 64, "batch_size": 64, "steps": 1000},
    learning_rate=0.012,
    decays=(0.15, 0.3, 0.5, 0.8),
    rhos=(0.0123, 0.041, 0.123, 0.41),
  ),
  "online": Regime(  # 117 tokens a parameter, none twice
    {"width": 64, "length": 64, "batch_size": 256, "steps": 1200},
    learning_rate=0.024,
    decays=(0.03, 0.1, 0.2, 0.4),
    rhos=(0.0123, 0.041, 0.123, 0.41),
  ),
  "overtrained": Regime(  # 500 tokens a parameter
    {"width": 32, "length": 64, "batch_size": 64, "steps": 7200},
    learning_rate=0.024,
    decays=(0.03, 0.1, 0.2, 0.4),
    rhos=(0.0073, 0.0243, 0.073, 0.243),
  ),
}


class Axis(NamedTuple):
  """One coordinate of a search."""

  key: str
  values: tuple[float, ...]  # to try; factors of the value so far if `relative`
  ratio: float  # by which the grid is extended
  relative: bool = False


REFINED = (Axis(PEAK, (0.5, 1, 2), 2, relative=True), Axis(DECAY, (2 / 3, 1, 3 / 2), 1.5, True))


def search(
  axes: Sequence[Axis], start: Point, loss: Callable[[Point], float | None]
) -> tuple[list[Point], Point | None]:
  """Coordinate search: every point it has asked for, and the best once all losses are known.

  `loss` is None where a run has yet to be made, infinite where it diverged. The search is a
  function of the losses alone, so it resumes by being asked again.
  """
  tried: list[Point] = []
  best = start
  for axis in axes:
    unit = best[axis.key] if axis.relative else 1.0
    grid = sorted(three_digits(unit * v) for v in axis.values)
    while True:
      points = [{**best, axis.key: v} for v in grid]
      tried += [p for p in points if p not in tried]
      losses = [loss(p) for p in points]
      if None in losses:
        return tried, None
      winner = int(np.argmin(losses))  # type: ignore[arg-type]
      if winner == 0:
        grid.insert(0, three_digits(grid[0] / axis.ratio))
      elif winner == len(grid) - 1:
        grid.append(three_digits(grid[-1] * axis.ratio))
      else:
        best = points[winner]
        break
  return tried, best


def three_digits(value: float) -> float:
  return float(f"{value:.3g}")


@dataclasses.dataclass
class Study:
  """A regime with its runs below `out`."""

  regime: str
  out: pathlib.Path
  source: str
  seeds: int  # of the verdict
  _made: dict[Any, Job] = dataclasses.field(default_factory=dict)
  protocol: str = __doc__ or ""

  @property
  def name(self) -> str:
    return self.regime

  @property
  def folder(self) -> pathlib.Path:
    return self.out / "runs"

  @property
  def fresh_seeds(self) -> list[int]:
    """Of the verdict: the first that nothing was tuned or planned on."""
    unused = (k for k in itertools.count(1) if k not in (TUNING_SEED, *PILOT_SEEDS))
    return list(itertools.islice(unused, self.seeds))

  def spec(self, method: str) -> str:
    arguments = {"method": method, **REGIMES[self.regime].arguments, "source": self.source}
    text = ",".join(f"{k}={v}" for k, v in arguments.items())
    return f"{os.path.relpath(ROOT / 'configs' / 'mini.py')}:{text}"

  def job(self, arm: Arm, point: Point, seed: int, more: Overrides | None = None) -> Job:
    seeds = {"seed": seed, "data_seed": seed}
    overrides = {**SHARED, **point, **seeds, **arm.overrides, **(more or {})}
    key = (arm, *overrides.items())
    if key not in self._made:  # resolving a config takes time, and a search asks again and again
      (self._made[key],) = sweeps.make_jobs([(self.spec(arm.method), overrides)], self.folder)
    return self._made[key]

  def trials(self, arm: Arm) -> tuple[list[Job], Point | None]:
    """The runs that tune a method, as far as they are known; and its best point at the end."""
    regime = REGIMES[self.regime]
    if arm.method == ADAMW:
      axes = (Axis(DECAY, regime.decays, 1.5), *REFINED)
      start = {PEAK: regime.learning_rate, DECAY: regime.decays[0]}
    else:
      _, tuned = self.trials(ARMS[0])
      if tuned is None:
        return [], None
      axes, start = (Axis(RHO, regime.rhos, 3), *REFINED), {**tuned, RHO: regime.rhos[0]}
    job = functools.partial(self.job, arm, seed=TUNING_SEED)
    tried, best = search(axes, start, lambda point: final_loss(job(point)))
    return [job(point) for point in tried], best

  def jobs(self, stage: str) -> list[Job]:
    """The runs of a stage that are known now; tuning asks for more as its runs end."""
    if stage == "tuning":
      return [job for arm in ARMS for job in self.trials(arm)[0]]
    if stage == "pilot":
      regime = REGIMES[self.regime]
      point = {PEAK: regime.learning_rate, DECAY: regime.decays[1]}
      arms = [(ARMS[0], point), (ARMS[4], {**point, RHO: regime.rhos[1]})]
      return [self.job(arm, at, seed) for seed in PILOT_SEEDS for arm, at in arms]
    best = {arm: found for arm in ARMS if (found := self.trials(arm)[1])}
    if stage == "compute":
      best.pop(ARMS[0], None)
    lengths = {arm: self.length(arm) if stage == "compute" else {} for arm in best}
    return [
      self.job(arm, point, seed, lengths[arm])
      for seed in self.fresh_seeds
      for arm, point in best.items()
    ]

  def length(self, arm: Arm) -> Overrides:
    """The steps that AdamW's compute buys, with a warmup in proportion."""
    adamw, other = (self.job(a, {}, 0).config for a in (ARMS[0], arm))
    outputs = source_of(adamw.data).outputs
    cheaper = step_flops(adamw, outputs) / step_flops(other, outputs)
    steps = round(adamw.opt.num_train_steps * cheaper)
    return {STEPS: steps, "opt.warmup_steps": steps // 10}

  def verdict(self, stage: str = "verdict") -> comparison.Report | None:
    """The methods on fresh seeds; at AdamW's compute, against AdamW's full runs."""
    jobs = self.jobs("verdict")
    if stage == "compute":
      jobs = [j for j in jobs if j.config.opt.method == ADAMW] + self.jobs(stage)
    found = [run for job in jobs if (run := job.stored()) and run.state != runs.UNFINISHED]
    if len({run.keys[METHOD] for run in found}) < 2:
      return None
    tune = (PEAK, DECAY, RHO, STEPS)
    report = comparison.compare(found, by=(METHOD, SIGN), tune=tune, baseline=ADAMW)
    for group in report.groups:
      group.label = label_of(group.keys)
    report.baseline = ADAMW
    return report


def label_of(keys: Overrides) -> str:
  return next(
    arm.label for arm in ARMS if arm.method == keys[METHOD] and arm.sign == (keys[SIGN] or 1.0)
  )


def final_loss(job: Job) -> float | None:
  run = job.stored()
  if run is None or run.state == runs.UNFINISHED:
    return None
  return run.evals[-1]["eval/loss"] if run.state == runs.FINISHED else math.inf


# ---- running and reporting -----------------------------------------------------------------------


class Searching(Protocol):
  """An experiment whose tuning is a search."""

  out: pathlib.Path
  protocol: str

  @property
  def name(self) -> str: ...
  def jobs(self, stage: str) -> list[Job]: ...


def train(study: Searching, stage: str, backend: str, parallel: int, argv: list[str]) -> None:
  """Trains a stage; tuning goes on as long as its search asks for more runs."""
  while True:
    jobs = study.jobs(stage)
    if not jobs:
      raise UserError(f"{study.name}: run --stage=tuning first, {stage} needs its best settings")
    missing = backends.missing(jobs, ENDED)
    if missing or stage != "tuning":
      entry = {"command": argv, "regime": study.name, "stage": stage}
      stages.record(study.out, study.protocol, entry, jobs)
      backends.execute(jobs, backend, parallel, argv, ENDED)
    if not missing or stage != "tuning":
      return


def write_report(study: Study, argv: list[str]) -> None:
  """results.json, table.md and the figure of one regime."""
  folder = study.out / study.regime
  folder.mkdir(parents=True, exist_ok=True)
  reports = {stage: study.verdict(stage) for stage in ("verdict", "compute")}
  found = {stage: report.to_json() for stage, report in reports.items() if report}
  tried = {
    arm.label: [{"run": job.id, "loss": final_loss(job)} for job in study.trials(arm)[0]]
    for arm in ARMS
  }
  power = {}
  for group in reports["verdict"].groups if reports["verdict"] else ():
    if group.difference and group.difference.pairs > 1:
      power[group.label] = paired.detectable(group.difference.deviation, group.difference.pairs)
  results = {"regime": study.regime, "command": argv, **found, "power": power, "tuning": tried}
  write_json(folder / RESULTS_FILE, results)
  write_atomically(folder / "table.md", table(study, results).encode())
  if "verdict" in found:
    for figure in differences_figure(found["verdict"], {}):
      figure.draw(folder / "differences")
  print(f"written: {folder}/{RESULTS_FILE} and table.md", flush=True)


def table(study: Study, results: Mapping[str, Any]) -> str:
  titles = {"verdict": "Equal steps, fresh seeds", "compute": "At AdamW's compute, fresh seeds"}
  compared = [
    Section(title, comparison_blocks("Eval loss", results[stage]))
    for stage, title in titles.items()
    if stage in results
  ]
  power = Table(
    ["method", "detectable difference (power 0.8)"],
    [[label, f"{value:.4f}"] for label, value in results["power"].items()],
  )
  tuning = Table(
    ["method", "run", "eval loss"],
    [
      [label, trial["run"], tables.number(trial["loss"], ".4f", "not finished or diverged")]
      for label, trials in results["tuning"].items()
      for trial in trials
    ],
  )
  return page.to_markdown(
    f"The {study.regime} regime",
    [
      Text(f"`python {shlex.join(results['command'])}`"),
      *compared,
      Grid("What the verdict could have told", power),
      Section(f"Tuning, seed {TUNING_SEED}", [Grid("Every trial", tuning)]),
    ],
  )
