"""What a run would be, from its config and data alone: nothing is trained, no device is used."""

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
from etils import epath

from nanosam import config as config_lib
from nanosam.data.packing import num_rows
from nanosam.data.sources import Source, source_of
from nanosam.data.store import read_manifest
from nanosam.model import sharding
from nanosam.model.transformer import non_embedding_count
from nanosam.run import flops, record
from nanosam.run.checkpoint import found_steps
from nanosam.run.start import check_origin
from nanosam.run.step import TrainStep
from nanosam.run.validate import check_source, validate
from nanosam.system.errors import UserError
from nanosam.system.remote import is_remote, storage_errors

GIB = 2**30


class Data(NamedTuple):
  """What a config's data are, as far as the model and the length of training go."""

  outputs: int  # pieces of the vocabulary, or classes
  rows: int  # to train on: sequences or images


def check(c: ml_collections.ConfigDict) -> Data:
  """Raises what a run would raise before its first step, but for what depends on its devices."""
  validate(c)
  data = _data(c)
  workdir = pathlib.Path(c.workdir)
  if not is_remote(c.workdir) and (record.has_record(workdir) or found_steps(epath.Path(workdir))):
    record.check_unchanged(workdir, config_lib.to_dict(c), c.allow_changed_keys)
  return data


def _data(c: ml_collections.ConfigDict) -> Data:
  kind, _, place = c.data.source.partition(":")
  if kind == "tokens" and is_remote(place):  # its manifest is enough
    with storage_errors(place):
      manifest = read_manifest(epath.Path(place))
    tokens = sum(shard["tokens"] for shard in manifest["splits"]["train"])
    check_source(c, image_size=0)
    rows = num_rows(tokens, c.model.L)
    if c.opt.num_train_steps * c.batch_size > rows and not c.data.repeat:
      raise UserError(
        f"{place} has {tokens} tokens, fewer than {c.opt.num_train_steps} steps take: set "
        "data.repeat=True, or train for fewer"
      )
    return Data(manifest["vocab_size"], rows)
  source = _open(json.dumps(c.data.to_dict()))
  check_source(c, source.image_size)
  size = {"L": c.model.L, "batch_size": c.batch_size}
  source.check_length(**size, steps=c.opt.num_train_steps, repeat=c.data.repeat)
  check_origin(c, source)
  return Data(source.outputs, _rows(source, c.model.L))


@functools.cache
def _open(data: str) -> Source:
  """Once for all runs of a sweep."""
  return source_of(ml_collections.ConfigDict(json.loads(data)))


def _rows(source: Source, L: int) -> int:
  tokens = getattr(source, "train_tokens", None)
  return source.independent_rows(L) if tokens is None else num_rows(tokens, L)


def facts(c: ml_collections.ConfigDict) -> dict[str, Any]:
  """All that can be known before the run, for JSON."""
  data = check(c)
  jax.config.update("jax_platforms", "cpu")
  step = TrainStep(_traceable(c), data.outputs, sharding.make_mesh(1, 1, jax.devices()[:1]))
  sizes = {
    "parameters": _bytes(step.abstract_state.params),
    "optimizer": _bytes(step.abstract_state.opt_state),
    "batch": _bytes(step.abstract_batch()),
    "gradient": _bytes(step.abstract_params),
    "perturbed parameters": _bytes(step.abstract_params) if step.recipe.direction else 0,
  }
  state, steps = _bytes(step.abstract_state), c.opt.num_train_steps
  per_step = flops.count(step.trace().jaxpr)
  tokens = steps * c.batch_size * c.model.L
  return {
    "config": config_lib.to_dict(c),
    "parameters": sum(x.size for x in jax.tree.leaves(step.abstract_params)),
    "non_embedding_parameters": non_embedding_count(step.abstract_params),
    "outputs": data.outputs,
    "steps": steps,
    "tokens": tokens,
    "epochs": steps * c.batch_size / data.rows,
    "flops_per_step": per_step,
    "flops": per_step * steps,
    "bytes": sizes,
    "checkpoint_bytes": state,
    "checkpoints_bytes": state * (c.max_to_keep + 1) if c.checkpoint else 0,
    "resumes_at": max([0, *_steps(c)]),
  }


def _traceable(c: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The same FLOPs without a GPU."""
  c = c.copy_and_resolve_references()
  c.model.attention = "plain" if c.model.attention == "plain" else "xla"
  return c


def _steps(c: ml_collections.ConfigDict) -> list[int]:
  return [] if is_remote(c.workdir) else found_steps(epath.Path(c.workdir))


def _bytes(tree: Any) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def describe(found: dict[str, Any]) -> str:
  gib = {part: f"{size / GIB:.3f} GiB" for part, size in found["bytes"].items() if size}
  at = found["resumes_at"]
  return "\n".join(
    [
      *(f"{key}={value}" for key, value in config_lib.flat(found["config"]).items()),
      "",
      f"parameters   {found['parameters']:,}, of which {found['non_embedding_parameters']:,} in "
      f"the layers; {found['outputs']:,} outputs",
      f"training     {found['steps']:,} steps, {found['tokens']:,} tokens or images, "
      f"{found['epochs']:.2f} epochs" + (f"; resumes at step {at}" if at else ""),
      f"compute      {found['flops_per_step']:.4g} FLOPs a step, {found['flops']:.4g} in all",
      f"memory       {', '.join(f'{part} {size}' for part, size in gib.items())}, on all devices",
      "             together; activations come on top: python -m nanosam.plan",
      f"checkpoints  {found['checkpoint_bytes'] / GIB:.3f} GiB each, up to "
      f"{found['checkpoints_bytes'] / GIB:.3f} GiB in the workdir",
      "valid: nothing was trained or written (--dry_run)",
    ]
  )
