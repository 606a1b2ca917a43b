"""Fine-tuning on other data, and the loss on the old and the new eval set along the way.

The fine-tuning is a training run of its own, with `init_from`, that resumes: plain AdamW at one
learning rate without decay, whatever the model was trained with, on batches in the order of the
model's own data seed. So two models of one seed differ by nothing but where they start.
"""

import argparse
from collections.abc import Iterator

import ml_collections

from nanosam import config as config_lib
from nanosam.curvature.changes import Point
from nanosam.curvature.diagnostics import Diagnostics
from nanosam.data.batch import EvalSet
from nanosam.data.sources import eval_set, source_of
from nanosam.run.evaluation import Evaluator
from nanosam.run.restore import Loaded, open_run
from nanosam.run.step import TrainStep
from nanosam.run.trainer import train

CHECKPOINTS = 5  # along the way


def finetuning(
  old: ml_collections.ConfigDict, workdir: str, step: int, args: argparse.Namespace
) -> ml_collections.ConfigDict:
  """The config of the run, but for its workdir."""
  c = ml_collections.ConfigDict(old.to_dict())
  steps, rate = args.finetune_steps, args.finetune_learning_rate
  c.update(workdir="", init_from=f"{workdir}@{step}", init_optimizer=False)
  usual = config_lib.default().opt.to_dict()  # also where the old run is special
  c.opt.update(usual | {"base": "adamw", "method": "adamw", "num_train_steps": steps})
  c.opt.update(peak_learning_rate=rate, init_learning_rate=0.0, final_learning_rate=rate)
  c.opt.update(warmup_steps=steps // 10, rho_warmup_steps=0, decay_type="constant")
  c.opt.update(weight_decay=0.0)
  c.data.update(source=args.source, repeat=True)
  # Every checkpoint is evaluated, and none may be cleared away, by an interruption either.
  every = max(1, steps // CHECKPOINTS)
  c.update(checkpoint=True, checkpoint_every_steps=every, max_to_keep=steps)
  c.update(eval_every_steps=steps, allow_changed_keys=False, profile_steps="", tensorboard=False)
  c.wandb.mode = "disabled"
  c.diagnostics.every = 0
  c.mesh.update(data=1, fsdp=-1)
  c.cluster.update(coordinator="", num_processes=1, process_id=-1)
  return c


def finetune(c: ml_collections.ConfigDict) -> None:
  """Trains; if that was done before, does nothing."""
  train(c, make_diagnostics=Diagnostics)


def new_eval_set(run: Loaded, source: str) -> EvalSet:
  return eval_set(source_of(run.config.data, source), run.config)


def along(
  run: Loaded, c: ml_collections.ConfigDict, old: Evaluator, new: Evaluator
) -> Iterator[tuple[Point, Point]]:
  """After some steps of fine-tuning: on the old text, and on the new one."""
  opened = open_run(c.workdir)
  wanted = {"params": TrainStep(c, run.source.outputs, run.mesh).abstract_state.params}
  for step in opened.checkpoints.steps():
    if step % c.checkpoint_every_steps == 0 or step == c.opt.num_train_steps:
      params = opened.checkpoints.restore_parts(wanted, step)["params"]
      yield Point(step, old(params), {}), Point(step, new(params), {})
  opened.checkpoints.close()
