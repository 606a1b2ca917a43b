"""Which runs each experiment of scripts/reproduce.py is made of, stage by stage.

Protocol, fixed before the runs (every cell that is run is reported):
(a) baseline  AdamW's peak learning rate and weight decay on a grid, one seed. The winner's are used
              by all methods. (Paper scale: the paper's own, no grid.)
(b) rho       per method, on that seed. In miniature rho = rms * sqrt(parameters), where rms is that
              of the perturbation per coordinate, between 1e-5 and 3e-4 for every method.
(c) seeds     every method at its best rho on further seeds. Run k has seed k and data_seed k for
              every method, so that differences are paired: same start, same data, same order.
(d) compute   AdamW with twice the steps, and each method with as many steps as cost what AdamW's
              run costs (about half), all under schedules of their own. Nothing is tuned again.
(e) factors   one thing changed at a time for AdamW, SAM and PrecondFuncSAM at the rho of (b): a
              quarter of the batch with four times the steps and half the learning rate; twice the
              steps; the letter of the paper's preconditioner (rho tuned again: its scale differs);
              bf16; untied.
Where the best of a grid is at its edge, the grid is extended, rho within an RMS of 1e-5 to 3e-4.
(f) tau       AdamW as configured, with the taus of Eq. 9 on the way (runs of their own).
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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from nanosam import config as config_lib
from nanosam.data.sources import source_of
from nanosam.model import sharding
from nanosam.run import flops
from nanosam.run.step import TrainStep
from nanosam.study import comparable, comparison, runs, sweep
from nanosam.system.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
ADAMW, PEAK, DECAY, RHO = "adamw", "opt.peak_learning_rate", "opt.weight_decay", "opt.rho"
TUNED, SCHEDULE = (PEAK, DECAY, RHO), "opt.rho_schedule"
TRAINED = ("baseline", "rho", "seeds", "compute", "factors")
STAGES = (*TRAINED, "tau")
MEASURES = ("sharpness", "prune")  # of final models
TAUS = 40  # measurements in a run
TUNING_SEED = 1
FACTORS = ("small_batch", "long", "paper_variant", "bf16", "untied")


class Setting(NamedTuple):
  """A row of a table, but for the method."""

  label: str
  config: str  # file under configs/
  arguments: dict[str, Any]  # of it
  paper: str = ""  # the paper's setting that it stands for


class Experiment(NamedTuple):
  methods: tuple[str, ...]
  settings: dict[str, list[Setting]]  # by scale
  stages: tuple[str, ...] = ("baseline", "rho", "seeds")
  measures: tuple[str, ...] = ()


def _paper(config: str, *sizes: str) -> list[Setting]:
  return [Setting(size, config, {"size": size}, paper=size) for size in sizes]


def _mini(*widths: int, paper: str = "", **arguments: Any) -> list[Setting]:
  return [Setting(f"width {w}", "mini.py", {"width": w, **arguments}, paper=paper) for w in widths]


def _activations(config: str, **arguments: Any) -> list[Setting]:
  return [Setting(a, config, {**arguments, "activation": a}, paper=a) for a in ("gelu", "relu")]


SIZES = ("23.9M", "42.5M", "117.9M", "1208M")
FOUR = (ADAMW, "sam", "precond_sam", "precond_func_sam")
SIX = (*FOUR, "func_sam", "momentum_func_sam")
EXPERIMENTS = {
  "table1": Experiment(
    SIX, {"mini": _mini(32, paper="2M"), "paper": _paper("fixed_length.py", "2M")}, TRAINED
  ),
  "table2": Experiment(FOUR, {"mini": _mini(32, 64), "paper": _paper("fixed_length.py", *SIZES)}),
  "table3": Experiment(
    FOUR,
    {
      "mini": _mini(32, 64, tokens_per_parameter=20.0),
      "paper": _paper("chinchilla.py", *SIZES),
    },
  ),
  "table4": Experiment(
    FOUR,
    {
      "mini": _mini(32, paper="23.9M"),
      "paper": _paper("chinchilla.py", "23.9M"),
    },
    measures=("sharpness",),
  ),
  "table5": Experiment(
    (ADAMW, "precond_sam", "precond_func_sam"),
    {
      "mini": _activations("mini.py", width=32),
      "paper": _activations("fixed_length.py", size="2M"),
    },
  ),
  "table6": Experiment(
    FOUR,
    {
      "mini": _mini(64, paper="117.9M"),
      "paper": _paper("chinchilla.py", "117.9M"),
    },
    measures=("sharpness",),
  ),
  "fig1": Experiment(
    (ADAMW, "sam"), {"mini": _mini(32), "paper": _paper("fixed_length.py", "23.9M")}
  ),
  "fig2": Experiment(
    (ADAMW,),
    {"mini": _mini(32), "paper": _paper("fixed_length.py", "2M", "23.9M")},
    ("tau",),
  ),
  "fig3": Experiment(
    (ADAMW, "sam", "precond_func_sam"),
    {"mini": _mini(32), "paper": _paper("fixed_length.py", "23.9M")},
    ("baseline", "rho"),
  ),
  "fig5": Experiment(
    (ADAMW, "sam", "precond_func_sam"),
    {"mini": _mini(32), "paper": _paper("fixed_length.py", "23.9M")},
    measures=("prune",),
  ),
}

Spec = tuple[str, sweep.Overrides]


def tuned_keys(chosen: Sequence[runs.Run]) -> list[str]:
  """The keys that runs of one setting have been tuned in: besides TUNED the schedule of rho, where
  a method needs another one (at 1208M)."""
  ended = [r for r in chosen if r.state != runs.UNFINISHED]
  values = {k: {r.keys[k] for r in ended if k in r.keys} for k in (*TUNED, SCHEDULE)}
  return [k for k, found in values.items() if len(found) > (k == SCHEDULE)]


@dataclasses.dataclass
class Lab:
  """An experiment at a scale, with the runs that lie in `out`."""

  name: str
  scale: str
  out: pathlib.Path
  source: str = ""
  seeds: int = 3
  factor_seeds: int = 1
  methods: tuple[str, ...] = ()  # () = the experiment's
  factors: tuple[str, ...] = FACTORS
  factor_methods: tuple[str, ...] = (ADAMW, "sam", "precond_func_sam")
  learning_rates: tuple[float, ...] = (8e-3, 1.6e-2, 3.2e-2)
  decays: tuple[float, ...] = (0.03, 0.1, 0.3)
  rms: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # more, of the config
  dry: bool = False  # where a stage needs an earlier one's result, take a placeholder

  def __post_init__(self) -> None:
    self.experiment = EXPERIMENTS[self.name]
    self.settings = self.experiment.settings[self.scale]
    self.methods = self.methods or self.experiment.methods
    self.measures = self.experiment.measures
    # Measuring on the way leaves a run as it is, and so its name: hence a place of their own.
    self.folder = self.out / ("runs-tau" if "tau" in self.experiment.stages else "runs")
    self.stages = tuple(
      s for s in self.experiment.stages if not (self.scale == "paper" and s == "baseline")
    )

  def spec(self, setting: Setting, method: str) -> str:
    arguments = {**setting.arguments, "method": method, **self.arguments}
    if self.scale == "mini" and self.source:
      arguments["source"] = self.source
    text = ",".join(f"{k}={v}" for k, v in arguments.items())
    return f"{os.path.relpath(ROOT / 'configs' / setting.config)}:{text}"

  def source_overrides(self) -> sweep.Overrides:
    return {"data.source": self.source} if self.scale == "paper" and self.source else {}

  def config(self, setting: Setting, method: str, overrides: sweep.Overrides | None = None) -> Any:
    c = config_lib.load(self.spec(setting, method))
    for key, value in {**self.source_overrides(), **(overrides or {})}.items():
      config_lib.override(c, key, str(value))
    return c

  @functools.cached_property
  def vocabulary(self) -> int:
    if self.scale == "paper":
      return config_lib.PAPER_VOCABULARY
    return source_of(self.config(self.settings[0], ADAMW).data).tokenizer.vocab_size

  @functools.cached_property
  def found(self) -> tuple[list[runs.Run], list[str]]:
    """Every run in `out`, and what is wrong with some."""
    return runs.find_runs([self.folder]) if self.folder.is_dir() else ([], [])

  def forget(self) -> None:
    """Runs have been made: look again."""
    self.__dict__.pop("found", None)

  def matching(self, setting: Setting, overrides: sweep.Overrides | None = None) -> list[runs.Run]:
    """The runs of a setting, whatever their tuned keys and seeds."""
    keys = {
      m: runs.training_keys(config_lib.to_dict(self.config(setting, m, overrides)))
      for m in self.methods
    }
    none = np.empty(0)
    wanted = {m: runs.Run(self.out, k, {}, [], 0, "", none, none) for m, k in keys.items()}
    return [
      run
      for run in self.found[0]
      if (like := wanted.get(run.keys["opt.method"]))
      and not comparable.differing_keys(run, like, TUNED)
      and run.keys["data.source"] == like.keys["data.source"]
    ]

  def report(
    self, setting: Setting, overrides: sweep.Overrides | None = None
  ) -> comparison.Report | None:
    """The methods compared; None if no run is finished."""
    chosen = self.matching(setting, overrides)
    if not any(r.state == runs.FINISHED for r in chosen):
      return None
    return comparison.compare(chosen, tune=tuned_keys(chosen))

  def best(self, setting: Setting, method: str) -> sweep.Overrides:
    """The tuned keys of a method, as overrides; in a dry run a guess will do."""
    report = self.report(setting)
    group = report.group(method) if report else None
    if group and math.isfinite(group.mean):
      return {k: v for k, v in group.best.settings.items()}
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
      return sweep.PAPER_RHO[method]
    counts = config_lib.parameter_counts(self.config(setting, method), self.vocabulary)
    return tuple(float(f"{rms * math.sqrt(counts['total']):.3g}") for rms in self.rms)

  def perturbing(self) -> list[str]:
    return [m for m in self.methods if m != ADAMW]

  def stage(self, name: str) -> list[Spec]:
    """The runs of a stage, each once."""
    specs = [spec for setting in self.settings for spec in getattr(self, f"_{name}")(setting)]
    return [(spec, {**self.source_overrides(), **overrides}) for spec, overrides in specs]

  def _seeded(
    self, setting: Setting, method: str, overrides: sweep.Overrides, seeds: int = 1
  ) -> list[Spec]:
    numbers = range(TUNING_SEED, TUNING_SEED + seeds)
    spec = self.spec(setting, method)
    return [(spec, {**overrides, "seed": k, "data_seed": k}) for k in numbers]

  def _baseline(self, setting: Setting) -> list[Spec]:
    grid = sweep.product({PEAK: self.learning_rates, DECAY: self.decays})
    return [run for point in grid for run in self._seeded(setting, ADAMW, point)]

  def _rho(self, setting: Setting) -> list[Spec]:
    base = self.best(setting, ADAMW)
    first = self._seeded(setting, ADAMW, base)  # AdamW itself, where there is no baseline stage
    return first + [
      run
      for method in self.perturbing()
      for rho in self.rho_grid(setting, method)
      for run in self._seeded(setting, method, {**base, RHO: rho})
    ]

  def _seeds(self, setting: Setting) -> list[Spec]:
    return [
      run
      for method in self.methods
      for run in self._seeded(setting, method, self.best(setting, method), self.seeds)
    ]

  def _compute(self, setting: Setting) -> list[Spec]:
    return [
      run
      for method, steps in self.equal_compute(setting).items()
      for run in self._seeded(setting, method, {**self.best(setting, method), **steps}, self.seeds)
    ]

  def equal_compute(self, setting: Setting) -> dict[str, sweep.Overrides]:
    """Lengths: AdamW's doubled; each other's such that it costs what AdamW's simple run does."""
    c = self.config(setting, ADAMW)
    steps, cost = c.opt.num_train_steps, step_flops(c, self.vocabulary)
    lengths = {ADAMW: 2 * steps} | {
      m: round(steps * cost / step_flops(self.config(setting, m), self.vocabulary))
      for m in self.perturbing()
    }
    share = c.opt.warmup_steps / steps
    return {
      m: {"opt.num_train_steps": n, "opt.warmup_steps": round(share * n)}
      for m, n in lengths.items()
      if m in self.methods
    }

  def _tau(self, setting: Setting) -> list[Spec]:
    every = max(1, self.config(setting, ADAMW).opt.num_train_steps // TAUS)
    return self._seeded(setting, ADAMW, {"diagnostics.every": every})

  def _factors(self, setting: Setting) -> list[Spec]:
    found = []
    for factor in self.factors:
      changes = self.factor(setting, factor)
      for method in (m for m in self.methods if m in self.factor_methods):
        best = self.best(setting, method)
        if factor == "small_batch" and PEAK in best:
          best[PEAK] /= 2
        points = [best]
        if factor == "paper_variant":
          if not method.startswith("precond"):
            continue
          # There eps = rho M^-1 g / |g|, so the RMS of eps is about rho / |g|.
          points = [{**best, RHO: rho} for rho in self.rms]
        for point in points:
          found += self._seeded(setting, method, {**point, **changes}, self.factor_seeds)
    return found

  def factor(self, setting: Setting, name: str) -> sweep.Overrides:
    """The keys that a factor changes."""
    c = self.config(setting, ADAMW)
    o = c.opt

    def longer(times: int) -> sweep.Overrides:
      return {
        "opt.num_train_steps": times * o.num_train_steps,
        "opt.warmup_steps": times * o.warmup_steps,
      }

    return {
      "small_batch": {
        "batch_size": c.batch_size // 4,
        "eval_every_steps": 4 * c.eval_every_steps,
        **longer(4),
      },
      "long": longer(2),
      "paper_variant": {"opt.precond_variant": "paper"},
      "bf16": {"model.dtype": "bfloat16"},
      "untied": {"model.tied": False},
    }[name]


_COUNTED: dict[str, int] = {}


def step_flops(c: ml_collections.ConfigDict, vocabulary: int) -> int:
  """Counted on the traced step, for one device; nothing is allocated or compiled."""
  o = c.opt
  parts = [c.model.to_dict(), c.head.to_dict(), c.batch_size, c.grad_accumulation_steps, vocabulary]
  parts += [o.method, o.base, o.angle_form, o.perturb_group, o.rho_schedule, o.rho == 0]
  key = json.dumps(parts)  # what the count depends on: many runs share it
  if key not in _COUNTED:
    mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
    _COUNTED[key] = flops.count(TrainStep(c, vocabulary, mesh).trace().jaxpr)
  return _COUNTED[key]


def unfinished(planned: Sequence[sweep.Planned]) -> list[str]:
  states = {p.id: p.stored() for p in planned}
  return [k for k, run in states.items() if run is None or run.state == runs.UNFINISHED]
