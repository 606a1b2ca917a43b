"""Loads a trained model from its workdir, for the commands that work on a run."""

import contextlib
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from nanosam import __version__
from nanosam import config as config_lib
from nanosam.data.batch import Batch
from nanosam.data.sources import Source, source_of, text_of
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import Params
from nanosam.optim import base
from nanosam.optim.direction import Moments
from nanosam.run import own_method, record, runtime
from nanosam.run.checkpoint import FOLDER, Checkpoints
from nanosam.run.cluster import ALONE, Hosts
from nanosam.run.metrics_file import METRICS_FILE, read_metrics
from nanosam.run.step import TrainState, TrainStep
from nanosam.system.errors import UsageError, UserError, need
from nanosam.system.remote import is_remote, storage_errors

RAW, AVERAGE = "raw", "average"


class Opened(NamedTuple):
  """A run whose arrays have not been read yet."""

  config: ml_collections.ConfigDict
  source: Source
  checkpoints: Checkpoints
  step: int
  weights: str = RAW

  def read(self, state: TrainState, some: Params | None = None, on_host: bool = False) -> Params:
    """The weights, or `some` of them; `state` is abstract, of the run's own optimizer."""
    tree = state.params if some is None else some
    if self.weights == RAW:
      return self.checkpoints.restore_parts({"params": tree}, self.step, on_host)["params"]
    place = next(i for i, s in enumerate(state.opt_state) if isinstance(s, base.AveragedWeights))
    wanted = {"opt_state": [*[None] * place, {"average": tree}]}
    found = self.checkpoints.restore_parts(wanted, self.step, on_host)
    return found["opt_state"][place]["average"]


class Loaded(NamedTuple):
  config: ml_collections.ConfigDict
  source: Source
  model: Classifier
  params: Params
  mesh: Mesh  # over all devices of this machine, however many the run had
  step: int
  opt_state: Any = None  # of the optimizer, if asked for
  workdir: str = ""

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """Every record of the run, in order: its losses, norms and speeds."""
    return read_metrics(epath.Path(self.workdir) / METRICS_FILE)

  def logits(self, inputs: Any) -> jax.Array:
    """[B, L, V] in fp32 of tokens [B, L], or [B, 1, classes] of images; text is one row of tokens,
    from bos on."""
    if isinstance(inputs, str):
      tokenizer = text_of(self.source, self.config.data.source).tokenizer
      inputs = [[tokenizer.bos_id, *tokenizer.encode(inputs)]]
    x = np.asarray(inputs)
    rows, L = len(x), self.config.model.L
    fits = self.source.image_size or x.shape[1] <= L
    need(fits, f"{x.shape[1]} tokens are more than the model's context of {L}")
    parts = sharding.shards(self.mesh)
    x = np.pad(x, [(0, -rows % parts)] + [(0, 0)] * (x.ndim - 1))
    with jax.set_mesh(self.mesh):
      batch = sharding.to_devices(Batch(x, None, None), self.mesh)
      return _logits(self.model, self.params, batch)[:rows]

  @property
  def moments(self) -> Moments:
    return Moments() if self.opt_state is None else base.moments(self.opt_state)


def open_run(folder: str | os.PathLike[str], step: str = "latest", weights: str = RAW) -> Opened:
  """The run at `step`: "latest", "best" or a number. Changes nothing in the workdir."""
  workdir = epath.Path(folder)
  c, environment = stored_run(workdir)
  if weights == AVERAGE and c.opt.average == "none":
    raise UsageError(f"{folder} has no averaged weights: it was trained with opt.average=none")
  runtime.set_up_jax(c)
  checkpoints = open_checkpoints(workdir)
  number = choose_step(checkpoints, workdir, step)
  source = source_of(c.data)
  if source.fingerprint != environment.get("data"):
    raise UserError(
      f"{workdir} was trained on data {environment.get('data')}, but {c.data.source} is now "
      f"{source.fingerprint} (other files, or other package versions behind the embedded corpus): "
      "restore that data"
    )
  return Opened(c, source, checkpoints, number, weights)


def load_run(
  folder: str | os.PathLike[str],
  step: str = "latest",
  with_moments: bool = False,
  weights: str = RAW,
) -> Loaded:
  """A trained run: its config, parameters, logits and metrics.

  `step` is "latest", "best" or a number; the model is spread over all devices of this machine.

  >>> run = nanosam.load("runs/mine")  # doctest: +SKIP
  >>> run.config.opt.method, run.metrics[-1]["eval/loss"]  # doctest: +SKIP
  >>> logits = run.logits("Return the")  # doctest: +SKIP
  """
  opened = open_run(folder, step, weights)
  c, source = opened.config, opened.source
  mesh = sharding.make_mesh(data=1, fsdp=-1)
  train_step = TrainStep(c, source.outputs, mesh)
  state, opt_state = train_step.abstract_state, None
  params = opened.read(state)
  if with_moments:
    wanted = {"opt_state": state.opt_state}
    opt_state = opened.checkpoints.restore_parts(wanted, opened.step)["opt_state"]
  opened.checkpoints.close()
  return Loaded(c, source, train_step.model, params, mesh, opened.step, opt_state, str(folder))


load = load_run  # what it is called outside: nanosam.load


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Classifier, params: Params, batch: Batch) -> jax.Array:
  h_BxLxD, W_VxD = model.outputs(params, batch)
  W_VxD = sharding.gathered(W_VxD, h_BxLxD.dtype)
  return jnp.einsum("bld,vd->blv", h_BxLxD, W_VxD, preferred_element_type=jnp.float32)


def stored_run(workdir: epath.Path) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """A run's config and environment; keys that are newer than the run have their defaults."""
  with storage_errors(str(workdir)) if is_remote(str(workdir)) else contextlib.nullcontext():
    stored = record.read_config(workdir)
  environment = stored.pop(record.ENVIRONMENT, {})
  c = ml_collections.ConfigDict(config_lib.default().to_dict())
  stored = config_lib.current(stored)
  try:
    if unknown := config_lib.flat(stored).keys() - config_lib.flat(c).keys():
      raise KeyError(f"there is no key {min(unknown)}")
    c.update(stored)
  except (KeyError, TypeError, AttributeError) as e:
    made_by = environment.get("packages", {}).get("nanosam")
    raise UserError(
      f"{workdir / record.CONFIG_FILE} is of another version of nanosam ({made_by}, this is "
      f"{__version__}): {e.args[0]}; use the version that trained it"
    ) from e
  own_method.restore(workdir, c)
  return c.lock(), environment


def open_checkpoints(workdir: epath.Path, hosts: Hosts = ALONE) -> Checkpoints:
  if not (workdir / FOLDER).is_dir():
    raise UserError(f"{workdir} has no checkpoints; train with --config.checkpoint=True")
  return Checkpoints(workdir, read_only=True, hosts=hosts)


def choose_step(checkpoints: Checkpoints, workdir: epath.Path, step: str) -> int:
  steps = checkpoints.steps()
  if not steps:
    raise UserError(f"{workdir} has no checkpoint yet: wait for the first, or train longer")
  if step == "latest":
    return steps[-1]
  if step == "best":
    path = workdir / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    evaluated = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    losses = {s: evaluated[s] for s in steps if math.isfinite(evaluated.get(s, math.nan))}
    if not losses:
      raise UserError(f"no checkpoint in {workdir} was evaluated: use --step=latest")
    return min(losses, key=lambda step: losses[step])
  if step.isdigit() and int(step) in steps:
    return int(step)
  there = ", ".join(map(str, steps))
  raise UsageError(f"{workdir} has no checkpoint {step}; choose latest, best or one of {there}")
