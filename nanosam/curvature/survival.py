"""What is left of a trained model's eval loss after its weights are changed.

Parts: noise, bits (rounding), prune; and with other data to fine-tune on, forgetting (the loss on
the old text) and learning (that on the new one).
"""

import argparse
import io
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from nanosam.curvature import changes, forgetting, pruning
from nanosam.curvature.changes import Point, Setting
from nanosam.data.batch import EvalSet
from nanosam.data.sources import eval_set
from nanosam.model.transformer import Params
from nanosam.run.evaluation import Evaluation, Evaluator
from nanosam.run.restore import Loaded
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically
from nanosam.system.progress import Progress

FILE = "survive.json"


class Axis(NamedTuple):
  key: str  # of a setting
  label: str


WEIGHTS = {
  "noise": Axis("noise", "noise, relative to the RMS of each matrix"),
  "bits": Axis("bits", "bits of a weight"),
  "prune": Axis("sparsity", "share of the weights set to zero"),
}
FORGETTING, LEARNING = "forgetting", "learning"
AXES = WEIGHTS | {
  FORGETTING: Axis("steps", "steps of fine-tuning; loss on the old text"),
  LEARNING: Axis("steps", "steps of fine-tuning; loss on the new text"),
}
# What decides the result, besides the model.
SETTINGS = """
  parts noise draws bits group sparsity params seed source finetune_steps finetune_learning_rate
""".split()


class Part(NamedTuple):
  base: Evaluation  # of the unchanged model
  points: list[Point]


class Survival(NamedTuple):
  """Of one model."""

  facts: dict[str, Any]
  parts: dict[str, Part]

  def to_json(self) -> dict[str, Any]:
    parts = {
      name: {
        "loss": part.base.loss,
        "loss_sem": part.base.loss_sem,
        "points": [
          {
            AXES[name].key: point.value,
            **point.facts,
            "loss": point.evaluation.loss,
            "loss_sem": point.evaluation.loss_sem,
            "rise": point.evaluation.loss - part.base.loss,
          }
          for point in part.points
        ],
      }
      for name, part in self.parts.items()
    }
    return {**self.facts, "parts": parts}


def settings(chosen: Params, args: argparse.Namespace) -> dict[str, list[Setting]]:
  """Of the parts that change weights, in the order they are asked for."""
  every = {
    "noise": [Setting(x, changes.noise(chosen, x), args.draws) for x in args.noise],
    "bits": [Setting(b, changes.rounding(chosen, b, args.group)) for b in args.bits],
    "prune": pruning.settings(chosen, args.sparsity),
  }
  return {name: every[name] for name in args.parts if name in every}


def measure(
  run: Loaded, workdir: str, args: argparse.Namespace, tuned: ml_collections.ConfigDict | None
) -> Survival:
  """`tuned`: the fine-tuning run that began with this model, for forgetting."""
  data = eval_set(run.source, run.config)
  evaluator = _evaluator(run, data)
  chosen = changes.choose(run.params, args.params)
  wanted = settings(chosen, args)
  progress, done = Progress(0), 0
  needed = 1 + sum(s.draws for members in wanted.values() for s in members)

  def say(what: str, evaluations: int) -> None:
    nonlocal done
    done += evaluations
    progress.work(f"{workdir}  {done}/{needed}  {what}", done, needed)

  base = evaluator(run.params)
  say("unchanged", 1)
  parts = {}
  for name, members in wanted.items():
    found = []
    key = jax.random.key(args.seed)
    for point in changes.points(evaluator, run.params, chosen, members, key):
      found.append(point)
      say(f"{AXES[name].key} {point.value:g}", members[0].draws)
    parts[name] = Part(base, found)
  if tuned:
    parts |= _forgetting(run, Part(base, []), evaluator, tuned)
  progress.close()
  facts = {
    "workdir": str(workdir),
    "step": run.step,
    "weights": args.weights,
    "method": run.config.opt.method,
    "settings": {name: getattr(args, name) for name in SETTINGS},
  }
  return Survival(facts, parts)


def _evaluator(run: Loaded, data: EvalSet) -> Evaluator:
  return Evaluator(run.model, data, run.config.eval_batch_size, run.mesh, keep=True)


def _forgetting(
  run: Loaded, old: Part, evaluator: Evaluator, tuned: ml_collections.ConfigDict
) -> dict[str, Part]:
  data = forgetting.new_eval_set(run, tuned.data.source)
  on_new = _evaluator(run, data)
  start = on_new(run.params)
  old_points, new_points = [Point(0, old.base, {})], [Point(0, start, {})]
  for old_point, new_point in forgetting.along(run, tuned, evaluator, on_new):
    old_points.append(old_point)
    new_points.append(new_point)
  return {
    FORGETTING: old._replace(points=old_points),
    LEARNING: Part(start, new_points),
  }


# ---- a measurement on disk, with every sequence --------------------------------------------------


def save(found: Survival, path: pathlib.Path) -> None:
  arrays: dict[str, Any] = {"facts": json.dumps(found.facts)}
  for name, part in found.parts.items():
    heads = [{"value": p.value, "facts": p.facts} for p in part.points]
    about = {"documents": part.base.documents, "bytes": part.base.bytes, "points": heads}
    arrays[f"{name}/about"] = json.dumps(about)
    arrays[f"{name}/weight"] = part.base.weight_R
    arrays[f"{name}/nll"] = np.stack([part.base.nll_R, *(p.evaluation.nll_R for p in part.points)])
  content = io.BytesIO()
  np.savez_compressed(content, **arrays)
  write_atomically(path, content.getvalue())


def load(path: pathlib.Path) -> Survival | None:
  """None if there is none."""
  if not path.is_file():
    return None
  try:
    with np.load(path) as f:
      stored = dict(f)
    facts = json.loads(str(stored["facts"]))
    names = [key.removesuffix("/about") for key in stored if key.endswith("/about")]
    return Survival(facts, {name: _part(stored, name) for name in names})
  except Exception as e:  # numpy and zipfile raise many kinds
    raise UserError(f"{path} is damaged ({e}): delete it, and run the same command again") from e


def _part(stored: Mapping[str, Any], name: str) -> Part:
  about, weight_R = json.loads(str(stored[f"{name}/about"])), stored[f"{name}/weight"]
  facts = {"weight_R": weight_R, "bytes": about["bytes"], "documents": about["documents"]}
  base, *others = (Evaluation(nll_R, **facts) for nll_R in stored[f"{name}/nll"])
  points = [
    Point(head["value"], evaluation, head["facts"])
    for head, evaluation in zip(about["points"], others, strict=True)
  ]
  return Part(base, points)
