"""Which runs each experiment of scripts/reproduce.py consists of, stage by stage.

Protocol, fixed before the runs (every cell that is run is reported):
(a) baseline  AdamW's peak learning rate and weight decay on a grid, one seed. All methods use the
              winner's. (Paper scale: the paper's own, no grid.)
(b) rho       per method, on that seed. In miniature rho = rms * sqrt(parameters), where rms is that
              of the perturbation per coordinate, between 1e-5 and 3e-4 for every method.
(c) seeds     every method at its best rho on further seeds. Run k has seed k and data_seed k for
              every method, so that differences are paired: same start, same data, same order.
(d) compute   AdamW with twice the steps, and each method with as many steps as cost what AdamW's
              run costs (about half), each under a schedule of its own. Nothing is tuned again.
(e) factors   one thing changed at a time for AdamW, SAM and PrecondFuncSAM at the rho of (b): a
              quarter of the batch with four times the steps and half the learning rate; twice the
              steps; the letter of the paper's preconditioner (rho tuned again: its scale differs);
              bf16; untied.
Where the best of a grid is at its edge, the grid is extended, rho within an RMS of 1e-5 to 3e-4.
(f) tau       AdamW as configured, with the taus of Eq. 9 measured during training (separate runs),
              on every seed.
Final models are then measured: sharpness (nanosam.sharpness) or prune (nanosam.prune), on every
seed of each method's best setting.
Whatever wins on the seed of (a) and (b) is flattered by it; (c) averages that seed with others.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections

from nanosam import config as config_lib
from nanosam.data.sources import source_of
from nanosam.model import sharding
from nanosam.paper.experiments import ADAMW, EXPERIMENTS, PAPER_RHO, Setting
from nanosam.run import flops
from nanosam.run.step import TrainStep
from nanosam.study import comparable, comparison, runs, sweeps
from nanosam.study.sweeps import Overrides
from nanosam.system.errors import UsageError, UserError

ROOT = pathlib.Path(__file__).parents[2]
PEAK, DECAY, RHO = "opt.peak_learning_rate", "opt.weight_decay", "opt.rho"
TUNED, SCHEDULE = (PEAK, DECAY, RHO), "opt.rho_schedule"
STEPS = "opt.num_train_steps"
TAUS = 40  # measurements in a run
FACTORS = ("small_batch", "long", "paper_variant", "bf16", "untied")
FACTOR_METHODS = (ADAMW, "sam", "precond_func_sam")


def tuned_keys(chosen: Sequence[runs.Run]) -> list[str]:
  """The keys in which runs of one setting were tuned: besides TUNED the schedule of rho, where some
  method needs another one (at 1208M)."""
  ended = [r for r in chosen if r.state != runs.UNFINISHED]
  values = {k: {r.keys[k] for r in ended if k in r.keys} for k in (*TUNED, SCHEDULE)}
  return [k for k, found in values.items() if len(found) > (k == SCHEDULE)]


@dataclasses.dataclass
class Lab:
  """An experiment at one scale, with its runs below `out`."""

  name: str
  scale: str
  out: pathlib.Path
  source: str = ""  # of text; {vocab_size} and the like stand for a setting's arguments
  images: str = ""  # data.source of the settings in vision; "" = their config's
  seeds: int = 3
  factor_seeds: int = 1
  methods: tuple[str, ...] = ()  # () = the experiment's
  factors: tuple[str, ...] = FACTORS
  learning_rates: tuple[float, ...] = (8e-3, 1.6e-2, 3.2e-2)
  decays: tuple[float, ...] = (0.03, 0.1, 0.3)
  rms: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
  targets: int = 0  # tokens or images that the taus are measured on; 0 = the config's batch
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # more, of the config
  dry: bool = False  # use placeholders for what an earlier stage has yet to find

  def __post_init__(self) -> None:
    experiment = EXPERIMENTS[self.name]
    for kind, names, known in (
      ("method", self.methods, experiment.methods),
      ("factor", self.factors, FACTORS),
    ):
      if unknown := set(names) - set(known):
        raise UsageError(f"{self.name} has no {kind} {unknown.pop()}: {', '.join(known)}")
    # AdamW comes first: everything is compared with it.
    self.methods = (ADAMW, *(m for m in self.methods or experiment.methods if m != ADAMW))
    if self.scale not in experiment.settings:
      raise UsageError(f"{self.name} is ours: it has no scale {self.scale}, use --scale=mini")
    self.settings = experiment.settings[self.scale]
    self._outputs: dict[str, int] = {}
    self.measures = experiment.measures
    # Diagnostics change neither the result nor the id of a run, so these runs need another folder.
    self.folder = self.out / ("runs-tau" if "tau" in experiment.stages else "runs")
    self.stages = tuple(
      s for s in experiment.stages if not (self.scale == "paper" and s == "baseline")
    )

  def spec(self, setting: Setting, method: str) -> str:
    arguments = {**setting.arguments, "method": method, **self.arguments}
    if setting.vision and self.images:
      arguments["source"] = self.images
    text = ",".join(f"{k}={v}" for k, v in arguments.items())
    return f"{os.path.relpath(ROOT / 'configs' / setting.config)}:{text}"

  def shared(self, setting: Setting) -> Overrides:
    """What all runs of a setting have in common, besides the arguments of their config."""
    tags: Overrides = {"wandb.tags": self.name}
    if not self.source or setting.vision:
      return tags
    return {**tags, "data.source": self.source.format(**setting.arguments)}

  def config(self, setting: Setting, method: str, overrides: Overrides | None = None) -> Any:
    return sweeps.resolve(self.spec(setting, method), {**self.shared(setting), **(overrides or {})})

  def outputs(self, c: ml_collections.ConfigDict) -> int:
    """Pieces of the vocabulary, or classes of images."""
    if self.scale == "paper":
      return config_lib.PAPER_VOCABULARY
    key = json.dumps(c.data.to_dict())
    if key not in self._outputs:
      self._outputs[key] = source_of(c.data).outputs
    return self._outputs[key]

  @functools.cached_property
  def found(self) -> tuple[list[runs.Run], list[str]]:
    """Every run in `out`, and what is wrong with some."""
    return runs.find_runs([self.folder]) if self.folder.is_dir() else ([], [])

  def forget(self) -> None:
    """More runs have been trained: read them again."""
    self.__dict__.pop("found", None)

  def matching(self, setting: Setting, overrides: Overrides | None = None) -> list[runs.Run]:
    """The runs of a setting, whatever their tuned keys and seeds."""
    wanted = {
      m: runs.training_keys(config_lib.to_dict(self.config(setting, m, overrides)))
      for m in self.methods
    }
    return [
      run
      for run in self.found[0]
      if (keys := wanted.get(run.keys["opt.method"]))
      and not comparable.differing_keys(run.keys, keys, TUNED)
      and all(run.keys[k] == keys[k] for k in ("data.source", "data.vocab_size"))
    ]

  def report(
    self, setting: Setting, overrides: Overrides | None = None
  ) -> comparison.Report | None:
    """The methods compared; None if no run is finished."""
    chosen = self.matching(setting, overrides)
    if not any(r.state == runs.FINISHED for r in chosen):
      return None
    return comparison.compare(chosen, tune=tuned_keys(chosen))

  def best(self, setting: Setting, method: str) -> Overrides:
    """The tuned keys of a method, as overrides."""
    report = self.report(setting)
    group = report.group(method) if report else None
    if group and math.isfinite(group.mean):
      return dict(group.best.settings)
    if method == ADAMW and self.scale == "paper":
      return {}  # the paper's own
    if not self.dry:
      stage = "baseline" if method == ADAMW else "rho"
      raise UserError(
        f"{setting.label}: {method} has no finished run to take its settings from; run the stage "
        f"'{stage}' first (--stage={stage})"
      )
    if method == ADAMW:
      return {PEAK: self.learning_rates[0], DECAY: self.decays[0]}
    return {**self.best(setting, ADAMW), RHO: self.rho_grid(setting, method)[0]}

  def rho_grid(self, setting: Setting, method: str) -> tuple[float, ...]:
    if self.scale == "paper":
      return PAPER_RHO[method]
    c = self.config(setting, method)
    params = train_step(c, self.outputs(c)).abstract_params
    count = sum(x.size for x in jax.tree.leaves(params))
    return tuple(float(f"{rms * math.sqrt(count):.3g}") for rms in self.rms)

  def jobs(self, stage: str) -> list[sweeps.Job]:
    return sweeps.make_jobs(self.stage(stage), self.folder)

  def stage(self, name: str) -> list[sweeps.Spec]:
    """The runs of a stage, each once."""
    return [
      (self.spec(setting, method), {**self.shared(setting), **overrides, "seed": k, "data_seed": k})
      for setting in self.settings
      for method, overrides, seeds in self._cells(name, setting)
      for k in range(1, seeds + 1)  # whatever is tuned is tuned on the first
    ]

  def _cells(self, stage: str, setting: Setting) -> Iterator[tuple[str, Overrides, int]]:
    """Method, overrides and number of seeds."""
    match stage:
      case "baseline":
        for point in sweeps.product({PEAK: self.learning_rates, DECAY: self.decays}):
          yield ADAMW, point, 1
      case "rho":
        base = self.best(setting, ADAMW)
        yield ADAMW, base, 1  # where there is no baseline stage
        for method in self.methods[1:]:
          for rho in self.rho_grid(setting, method):
            yield method, {**base, RHO: rho}, 1
      case "seeds":
        for method in self.methods:
          yield method, self.best(setting, method), self.seeds
      case "compute":
        for method, steps in self.equal_compute(setting).items():
          overrides = {**self.best(setting, method), **self.length(setting, steps)}
          yield method, overrides, self.seeds
      case "factors":
        for factor in self.factors:
          yield from self._factor_cells(setting, factor)
      case "tau":
        c = self.config(setting, ADAMW)
        measured = {"diagnostics.every": max(1, c.opt.num_train_steps // TAUS)}
        if self.targets:
          measured["diagnostics.batch_size"] = max(1, self.targets // c.model.L)
        yield ADAMW, measured, self.seeds

  def _factor_cells(self, setting: Setting, factor: str) -> Iterator[tuple[str, Overrides, int]]:
    for method in (m for m in self.methods if m in FACTOR_METHODS):
      best = self.best(setting, method)
      if factor == "small_batch" and PEAK in best:
        best[PEAK] /= 2
      points = [best]
      if factor == "paper_variant":
        # There eps = rho M^-1 g / |g|, so the RMS of eps is about rho / |g|.
        points = [{**best, RHO: rho} for rho in self.rms if method.startswith("precond")]
      for point in points:
        yield method, {**point, **self.factor(setting, factor)}, self.factor_seeds

  def factor(self, setting: Setting, name: str) -> Overrides:
    """The keys that a factor changes."""
    c = self.config(setting, ADAMW)
    quarter = {"batch_size": c.batch_size // 4, "eval_every_steps": 4 * c.eval_every_steps}
    changes: dict[str, Overrides] = {
      "small_batch": {**quarter, **self.length(setting, 4 * c.opt.num_train_steps)},
      "long": self.length(setting, 2 * c.opt.num_train_steps),
      "paper_variant": {"opt.precond_variant": "paper"},
      "bf16": {"model.dtype": "bfloat16"},
      "untied": {"model.tied": False},
    }
    return changes[name]

  def equal_compute(self, setting: Setting) -> dict[str, int]:
    """Steps by method: AdamW's doubled, and for each other as many as AdamW's normal run pays."""
    c = self.config(setting, ADAMW)
    steps, outputs = c.opt.num_train_steps, self.outputs(c)
    cost = step_flops(c, outputs)
    return {ADAMW: 2 * steps} | {
      m: round(steps * cost / step_flops(self.config(setting, m), outputs))
      for m in self.methods[1:]
    }

  def length(self, setting: Setting, steps: int) -> Overrides:
    """A run of so many steps, its warmup in proportion."""
    o = self.config(setting, ADAMW).opt
    return {STEPS: steps, "opt.warmup_steps": round(o.warmup_steps / o.num_train_steps * steps)}


_COUNTED: dict[str, int] = {}


def train_step(c: ml_collections.ConfigDict, outputs: int) -> TrainStep:
  """For one device; to look at, without compiling it."""
  return TrainStep(c, outputs, sharding.make_mesh(1, 1, devices=jax.devices()[:1]))


def step_flops(c: ml_collections.ConfigDict, outputs: int) -> int:
  """Counted on the traced step, for one device; nothing is allocated or compiled."""
  o = c.opt
  parts = [c.model.to_dict(), c.head.to_dict(), c.batch_size, c.grad_accumulation_steps, outputs]
  parts += [o.method, o.base, o.angle_form, o.perturb_group, o.rho_schedule, o.rho == 0]
  key = json.dumps(parts)  # what the count depends on: many runs share it
  if key not in _COUNTED:
    _COUNTED[key] = flops.count(train_step(c, outputs).trace().jaxpr)
  return _COUNTED[key]
