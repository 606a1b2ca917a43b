"""A trained model, read back from its workdir: what the commands over a run share."""

import argparse
import contextlib
import os
from typing import Any, NamedTuple, NoReturn

import ml_collections
from etils import epath
from jax.sharding import Mesh

from nanosam import config as config_lib
from nanosam import runtime, sharding
from nanosam import workdir as workdir_lib
from nanosam.checkpoint import FOLDER, Checkpoints
from nanosam.data.pipeline import Source, source_of
from nanosam.data.remote import is_remote, reaching
from nanosam.errors import UsageError, UserError
from nanosam.model import Params
from nanosam.optim.passes import Net
from nanosam.step import Trainer


class Loaded(NamedTuple):
  config: ml_collections.ConfigDict
  source: Source
  net: Net
  params: Params
  mesh: Mesh  # over all devices of this machine, however many the run had
  step: int


def load_run(workdir: str | os.PathLike[str], step: str = "latest") -> Loaded:
  """The run's model at `step`: "latest", "best" or a number. Changes nothing in the workdir."""
  workdir = epath.Path(workdir)
  with reaching(str(workdir)) if is_remote(str(workdir)) else contextlib.nullcontext():
    stored = workdir_lib.read_config(workdir)
  environment = stored.pop(workdir_lib.ENVIRONMENT, {})
  c = _config(stored)
  runtime.set_up_jax(c)
  checkpoints = _open_checkpoints(workdir)
  number = _choose(checkpoints, workdir, step)
  source = source_of(c.data)
  if source.fingerprint != environment.get("data"):
    raise UserError(
      f"{workdir} was trained on data {environment.get('data')}, but {c.data.source} is now "
      f"{source.fingerprint} (other files, or other package versions under the embedded corpus); "
      "restore that data"
    )
  mesh = sharding.make_mesh(data=1, fsdp=-1)
  trainer = Trainer(c, source.tokenizer.vocab_size, mesh)
  params = checkpoints.restore_params(trainer.abstract_state.params, number)
  checkpoints.close()
  return Loaded(c, source, trainer.net, params, mesh, number)


def _config(stored: dict[str, Any]) -> ml_collections.ConfigDict:
  """Keys that are younger than the run have their defaults."""
  c = ml_collections.ConfigDict(config_lib.default().to_dict())
  c.update(stored)
  return c.lock()


def _open_checkpoints(workdir: epath.Path) -> Checkpoints:
  if not (workdir / FOLDER).is_dir():
    raise UserError(f"{workdir} has no checkpoints; train with --config.checkpoint=True")
  return Checkpoints(workdir, read_only=True)


def _choose(checkpoints: Checkpoints, workdir: epath.Path, step: str) -> int:
  steps = checkpoints.steps()
  if not steps:
    raise UserError(f"{workdir} has no checkpoint yet; wait for the first, or train on")
  if step == "latest":
    return steps[-1]
  if step == "best":
    best = checkpoints.best_step()
    if best is None:
      raise UserError(f"no checkpoint in {workdir} was evaluated; say --step=latest")
    return best
  if step.isdigit() and int(step) in steps:
    return int(step)
  there = ", ".join(map(str, steps))
  raise UsageError(f"{workdir} has no checkpoint {step}; choose latest, best or one of {there}")


class Arguments(argparse.ArgumentParser):
  """The command line of a command over a run; a mistake in it is one line, like any other."""

  def __init__(self, command: str, description: str | None):
    super().__init__(
      prog=f"python -m nanosam.{command}",
      description=description,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )
    self.add_argument("--workdir", required=True, help="of the run")
    self.add_argument("--step", default="latest", help="latest (default), best, or a number")

  def error(self, message: str) -> NoReturn:
    raise UsageError(f"{message}; {self.prog} --help shows what there is")
