"""Is AdamW better off if it sees hard documents twice? The data lever, with its controls.

The claim ("Data Distribution as a Lever for Guiding Optimizers Toward Superior Generalization in
LLMs"): a small proxy finds the examples that are learned late; showing these twice gives AdamW what
SAM would give it. It was made for fine-tuning on mathematics. Here: pretraining on text, about
1.4 M tokens, three epochs.

Protocol, fixed before the runs (every run is reported):
  proxy    AdamW for one epoch on seed 31, once smaller than the target and once equal to it, with
           15 checkpoints at equal distances.
  weights  Documents in two clusters by the proxy's losses; one cluster is shown twice an epoch.
           hard, easy and random: as many documents of each, by the trajectory over the first 5
           checkpoints (a third of an epoch), as in the paper. Variants of hard: by the last of the
           5 checkpoints, by the loss relative to an untrained model, with 10 or 15 checkpoints, and
           with the proxy that equals the target.
  tuning   The learning rate of every arm on seed 11: half, once and twice a first value; a best
           value at the edge extends the grid until it is inside. AdamW has all arms, Muon and
           PrecondFuncSAM (at one rho) have none, hard and random.
  verdict  Every arm at its best learning rate on fresh seeds, which all arms share: same start,
           equal steps. Differences to the arm without weights of the same optimizer, by seed.
  compute  Every arm with weights, at its best learning rate, with the steps that are left of the
           budget of the arm without once its proxy and its scoring are paid, under a schedule for
           that length.
  measure  The final models of the verdict on hard and on easy validation documents (by the proxy
           and the centroids of `hard`), and on another corpus.
The outcome is the eval loss after the last step. No setting is chosen by a verdict seed. Where an
interval contains zero, no difference is claimed.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nanosam.data.sources import source_of
from nanosam.data.weights import read_weights
from nanosam.paper.experiments import ADAMW
from nanosam.paper.protocol import PEAK, RHO, ROOT, STEPS, step_flops
from nanosam.paper.regimes import TUNING_SEED, Axis, Point, final_loss, search
from nanosam.study import comparison, runs, sweeps
from nanosam.study.sweeps import Job, Overrides
from nanosam.system.command_line import with_pairs
from nanosam.system.errors import UserError, need

STAGES = ("proxy", "weights", "tuning", "verdict", "compute", "measure")
TRAINED = ("proxy", "tuning", "verdict", "compute")
WEIGHTS, BASE, METHOD = "data.weights", "opt.base", "opt.method"
PROXY_SEED, CHECKPOINTS = 31, 15
MAIN = "hard"  # the weights whose clusters divide the validation documents


@dataclasses.dataclass(frozen=True)
class Settings:
  width: int = 64
  proxy_width: int = 32
  length: int = 64
  batch_size: int = 64
  steps: int = 1000  # three epochs of 1.37 M tokens
  proxy_steps: int = 330  # one
  learning_rate: float = 0.012  # where the searches begin
  weight_decay: float = 0.1
  rho: float = 0.041  # of PrecondFuncSAM, an RMS of 1e-4 a coordinate
  eval_steps: int = 32
  measured_rows: int = 8192  # of validation documents


def changed(pairs: Sequence[str]) -> Settings:
  """The usual settings, with NAME=VALUE pairs of a command line."""
  settings = with_pairs(Settings(), pairs)
  need(settings.proxy_steps >= CHECKPOINTS, f"proxy_steps must be {CHECKPOINTS} or more")
  return settings


class Recipe(NamedTuple):
  """How weights are made."""

  feature: str = "trajectory"
  choose: str = "hard"
  checkpoints: int = 5
  equal_proxy: bool = False


RECIPES = {
  MAIN: Recipe(),
  "easy": Recipe(choose="easy"),
  "random": Recipe(choose="random"),
  "hard by last": Recipe(feature="last"),
  "hard by relative": Recipe(feature="relative"),
  "hard, 10 checkpoints": Recipe(checkpoints=10),
  "hard, 15 checkpoints": Recipe(checkpoints=15),
  "hard, equal proxy": Recipe(equal_proxy=True),
}


class Arm(NamedTuple):
  optimizer: str
  weights: str = ""  # a recipe; "" = none

  @property
  def label(self) -> str:
    return f"{self.optimizer}, {self.weights or 'none'}"


OPTIMIZERS: dict[str, Overrides] = {
  ADAMW: {METHOD: ADAMW},
  "muon": {METHOD: ADAMW, BASE: "muon"},
  "precond_func_sam": {METHOD: "precond_func_sam"},
}
ARMS = (
  *(Arm(ADAMW, name) for name in ("", *RECIPES)),
  *(Arm(other, name) for other in list(OPTIMIZERS)[1:] for name in ("", MAIN, "random")),
)


@dataclasses.dataclass
class Lever:
  """The experiment with its runs below `out`."""

  out: pathlib.Path
  source: str  # a token store
  other: str  # another, made with the same tokenizer
  seeds: int  # of the verdict
  settings: Settings = Settings()
  protocol: str = __doc__ or ""
  name: str = "lever"
  _made: dict[Any, Job] = dataclasses.field(default_factory=dict)

  @property
  def fresh_seeds(self) -> list[int]:
    unused = (k for k in itertools.count(1) if k not in (TUNING_SEED, PROXY_SEED))
    return list(itertools.islice(unused, self.seeds))

  def file(self, recipe: str) -> pathlib.Path:
    return self.out / "weights" / f"{recipe.replace(', ', '-').replace(' ', '-')}.npz"

  def _job(self, folder: str, arguments: Overrides, overrides: Overrides) -> Job:
    s = self.settings
    shared = {"length": s.length, "batch_size": s.batch_size, "source": self.source}
    text = ",".join(f"{k}={v}" for k, v in {**arguments, **shared}.items())
    spec = f"{os.path.relpath(ROOT / 'configs' / 'mini.py')}:{text}"
    usual = {"model.N": 2, "model.H": 2, "opt.final_learning_rate": 0.0, "eval_steps": s.eval_steps}
    usual |= {PEAK: s.learning_rate, "opt.weight_decay": s.weight_decay}
    key = (folder, spec, *overrides.items())
    if key not in self._made:  # resolving a config takes time, and a search asks again and again
      made = sweeps.make_jobs([(spec, {**usual, **overrides})], self.out / folder)
      (self._made[key],) = made
    return self._made[key]

  def proxy(self, equal: bool) -> Job:
    s = self.settings
    width = s.width if equal else s.proxy_width
    saved = {"checkpoint_every_steps": self.distance, "max_to_keep": CHECKPOINTS + 1}
    seeds = {"seed": PROXY_SEED, "data_seed": PROXY_SEED}
    return self._job("proxies", {"width": width, "steps": s.proxy_steps}, {**saved, **seeds})

  @property
  def distance(self) -> int:
    """Of the proxy's checkpoints, in steps."""
    return max(1, self.settings.proxy_steps // CHECKPOINTS)

  def job(self, arm: Arm, point: Point, seed: int, more: Overrides | None = None) -> Job:
    overrides = {**OPTIMIZERS[arm.optimizer], **point, "seed": seed, "data_seed": seed}
    if arm.optimizer == "precond_func_sam":
      overrides[RHO] = self.settings.rho
    if arm.weights:
      overrides[WEIGHTS] = self.file(arm.weights)
    arguments = {"width": self.settings.width, "steps": self.settings.steps}
    return self._job("runs", arguments, {**overrides, **(more or {})})

  def trials(self, arm: Arm) -> tuple[list[Job], Point | None]:
    """The runs that tune an arm, as far as they are known; and its best point at the end."""
    axes = (Axis(PEAK, (0.5, 1, 2), 2, relative=True),)
    job = functools.partial(self.job, arm, seed=TUNING_SEED)
    start = {PEAK: self.settings.learning_rate}
    tried, best = search(axes, start, lambda point: final_loss(job(point)))
    return [job(point) for point in tried], best

  def jobs(self, stage: str) -> list[Job]:
    """The runs of a stage that are known now; tuning asks for more as its runs end."""
    if stage == "proxy":
      return [self.proxy(equal) for equal in (False, True)]
    if stage == "tuning":
      return [job for arm in ARMS for job in self.trials(arm)[0]]
    best = {arm: found for arm in ARMS if (found := self.trials(arm)[1])}
    more: dict[Arm, Overrides] = {arm: {} for arm in best}
    if stage == "compute":
      more = {arm: found for arm in best if arm.weights and (found := self.length(arm))}
    return [
      self.job(arm, best[arm], seed, found)
      for seed in self.fresh_seeds
      for arm, found in more.items()
    ]

  def paid(self, arm: Arm) -> float:
    """The steps that its proxy and its scoring would have bought."""
    c = self.job(arm, {}, 0).config
    by_step = step_flops(c, source_of(c.data, self.source).outputs)
    return read_weights(str(self.file(arm.weights))).flops / by_step

  def length(self, arm: Arm) -> Overrides:
    """The steps that are left once the weights are paid, with a warmup in proportion; nothing if
    there are none."""
    steps = round(self.settings.steps - self.paid(arm))
    return {STEPS: steps, "opt.warmup_steps": steps // 10} if steps > 0 else {}

  def verdict(self, optimizer: str, stage: str = "verdict") -> comparison.Report | None:
    """An optimizer's arms against its own without weights, on fresh seeds."""
    jobs = self.jobs("verdict")
    if stage == "compute":
      jobs = [j for j in jobs if not j.config.data.weights] + self.jobs(stage)
    mine = OPTIMIZERS[optimizer]
    jobs = [j for j in jobs if all(_value(j, key) == value for key, value in mine.items())]
    jobs = [j for j in jobs if BASE in mine or j.config.opt.base == ADAMW]
    found = [run for job in jobs if (run := job.stored()) and run.state != runs.UNFINISHED]
    if len({run.keys[WEIGHTS] for run in found}) < 2:
      return None
    report = comparison.compare(found, by=(WEIGHTS,), tune=(PEAK, STEPS), baseline="none")
    names = {str(self.file(name)): name for name in RECIPES}
    for group in report.groups:
      group.label = names.get(group.keys[WEIGHTS], "none")
    return report


def _value(job: Job, key: str) -> Any:
  section, name = key.split(".")
  return job.config[section][name]


def make_weights(lever: Lever, say: Callable[[str], None]) -> None:
  """Makes what is missing; the losses of a proxy are shared by all of its weights."""
  for name, recipe in RECIPES.items():
    file, proxy = lever.file(name), lever.proxy(recipe.equal_proxy)
    if file.exists():
      continue
    stored = proxy.stored()
    if stored is None or stored.state != runs.FINISHED:
      raise UserError(f"{proxy.workdir} is not trained yet: run --stage=proxy first")
    steps = [lever.distance * (k + 1) for k in range(recipe.checkpoints)]
    words = [f"--workdir={proxy.workdir}", f"--out={file}", f"--feature={recipe.feature}"]
    words += [f"--choose={recipe.choose}", f"--steps={','.join(map(str, steps))}"]
    say(f"weights: {name}")
    command = [sys.executable, "-m", "nanosam.data.difficulty", *words]
    if subprocess.run(command).returncode:
      raise UserError(f"the weights {name} could not be made; the line above says why")
