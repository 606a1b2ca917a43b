"""One run in one workdir: restores or starts it, then trains to the last step."""

import contextlib
import dataclasses
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
from clu import parameter_overview

from nanosam import config as config_lib
from nanosam.curvature.diagnostics import TAU, Diagnostics
from nanosam.data.batch import Batch, Reading, batch_hash, combine_hashes
from nanosam.data.sources import Source, eval_set, merge_states, source_of
from nanosam.model import sharding
from nanosam.model.transformer import non_embedding_count
from nanosam.run import flops, health, runtime
from nanosam.run import workdir as workdir_lib
from nanosam.run.checkpoint import Checkpoints, found_steps
from nanosam.run.cluster import Hosts
from nanosam.run.evaluation import Evaluator, Stopped
from nanosam.run.log import METRICS_FILE, FanOut, Writer, open_writers, read_metrics
from nanosam.run.meter import Cost, Meter
from nanosam.run.profiling import Profiler
from nanosam.run.step import TrainState, TrainStep
from nanosam.run.validate import check_devices
from nanosam.run.workdir import Workdir
from nanosam.system import errors
from nanosam.system.progress import Progress
from nanosam.system.signals import StopRequest


def train(c: ml_collections.ConfigDict, workdir: Workdir, stop: StopRequest, hosts: Hosts) -> None:
  """Trains to the last step, from where the workdir stands; raises Interrupted if asked to stop."""
  with stop.nothing_to_save():
    runtime.set_up_jax(c)
    mesh = sharding.make_mesh(c.mesh.data, c.mesh.fsdp)
    check_devices(c, sharding.shards(mesh))
    source = source_of(c.data)
    source.check_length(
      L=c.model.L, batch_size=c.batch_size, steps=c.opt.num_train_steps, repeat=c.data.repeat
    )
    run = Trainer(c, workdir, source, TrainStep(c, source.tokenizer.vocab_size, mesh), stop, hosts)
    if run.finished():
      run.say(f"{workdir} is finished: {run.at.step} steps, eval loss {run.at.last_eval_loss:.4f}")
      return
    run.start()
  exit_code = errors.UserError.exit_code
  try:
    run.loop()
    exit_code = 0 if run.finished() else errors.Interrupted.exit_code
  except BaseException as e:
    hosts.report(e)
    raise
  finally:
    run.close(exit_code)
  if not run.finished():
    again = "resume" if c.checkpoint else "start over (config.checkpoint is off)"
    raise errors.Interrupted(f"stopped at step {run.at.step}; run the same command to {again}")
  run.say(f"finished: {workdir}")


class Pending(NamedTuple):
  """A step under way on the device."""

  step: int
  metrics: dict[str, jax.Array]
  batch: Batch
  epoch: float  # of the data, after it


@dataclasses.dataclass
class Position:
  """Where a run stands."""

  step: int = 0  # updates made
  evaluated: int = 0  # step of the last evaluation
  diagnosed: int = -1  # step of the last measurement of tau
  last_eval_loss: float = math.nan
  best_eval_loss: float = math.inf

  def book(self, step: int, eval_loss: float) -> None:
    self.evaluated, self.last_eval_loss = step, eval_loss
    self.best_eval_loss = min(self.best_eval_loss, eval_loss)  # a NaN is never the best


def position(workdir: pathlib.Path, step: int) -> Position:
  """The position after `step` updates; the evaluations until then are those on record."""
  at, path = Position(step), workdir / METRICS_FILE
  for record in read_metrics(path) if path.exists() else []:
    if "eval/loss" in record and record["step"] <= step:
      at.book(record["step"], record["eval/loss"])
    if TAU in record and record["step"] <= step:
      at.diagnosed = record["step"]
  return at


def refuse_finished(workdir: pathlib.Path) -> None:
  """Of a finished run that has no checkpoints the record is all there is: it stays."""
  if not workdir_lib.has_record(workdir):
    return
  steps = workdir_lib.read_config(workdir)["opt"]["num_train_steps"]
  if position(workdir, steps).evaluated == steps:
    raise errors.UserError(
      f"{workdir} holds the record of a finished run without checkpoints, which training would "
      "overwrite: use another workdir, or remove this one"
    )


class Trainer:
  """One run in one workdir."""

  def __init__(
    self,
    c: ml_collections.ConfigDict,
    workdir: Workdir,
    source: Source,
    train_step: TrainStep,
    stop: StopRequest,
    hosts: Hosts,
  ):
    self.c, self.workdir, self.source, self.train_step, self.stop = (
      c,
      workdir,
      source,
      train_step,
      stop,
    )
    self.mesh, self.hosts, self.files = train_step.mesh, hosts, workdir.files
    self.progress = Progress(c.opt.num_train_steps, None if hosts.first else open(os.devnull, "w"))
    self.say = self.progress.note
    self.stream = source.train_stream(
      Reading(
        L=c.model.L,
        batch_size=c.batch_size,
        rows=sharding.local_rows(self.mesh, c.batch_size),
        data_seed=c.data_seed,
        repeat=c.data.repeat,
        mask_documents=c.data.mask_documents,
        workers=c.data.workers,
        prefetch=c.data.prefetch,
      )
    )
    self.checkpoints = (
      Checkpoints(workdir.home, c.max_to_keep, say=self.say, hosts=hosts) if c.checkpoint else None
    )
    self.state, self.at, self.cost = self.restore_or_init()

  def restore_or_init(self) -> tuple[TrainState, Position, Cost]:
    steps = self.checkpoints.steps() if self.checkpoints else []
    if self.hosts.first:
      self.check_workdir(steps)
    if self.checkpoints and steps:
      if restored := self.checkpoints.restore_newest(self.train_step.abstract_state):
        self.stream.restore(restored.run["data"])
        self.say(f"resuming {self.workdir} at step {restored.step}")
        found = dataclasses.asdict(position(self.files, restored.step))
        at = Position(**self.hosts.from_first(found))
        return restored.state, at, Cost(**restored.run["cost"])
    if self.hosts.first:
      refuse_finished(self.files)
    return self.train_step.init(self.c.seed), Position(), Cost()

  def check_workdir(self, steps: list[int]) -> None:
    """Refuses to lose, or to mix up with something else, what the workdir holds."""
    if not self.checkpoints and found_steps(self.workdir.home):
      raise errors.UsageError(
        f"{self.workdir} holds checkpoints, which a run with checkpoint=False would neither "
        "continue nor replace: use another workdir"
      )
    if steps or workdir_lib.has_record(self.files):
      settings = config_lib.to_dict(self.c)
      workdir_lib.check_unchanged(self.files, settings, self.c.allow_changed_keys)
    if steps and steps[-1] > (wanted := self.c.opt.num_train_steps):
      raise errors.UsageError(
        f"{self.workdir} stands at step {steps[-1]}, beyond opt.num_train_steps={wanted}: ask for "
        "more, or use another workdir"
      )

  def start(self) -> None:
    """Compiles the step and opens what the loop writes to."""
    c = self.c
    data = eval_set(self.source, c)
    self.evaluator = Evaluator(self.train_step.model, data, c.eval_batch_size, self.mesh)
    devices = f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"
    self.say(f"{c.opt.method} on {devices}; compiling the step")
    traced = self.train_step.trace()
    flops_per_step = flops.count(traced.jaxpr)
    flops_unperturbed = flops.count(traced.jaxpr, branch=min)
    self.step_fn = traced.lower().compile()
    params = self.train_step.abstract_params
    facts = {
      "parameters": int(parameter_overview.count_parameters(params)),
      "non_embedding_parameters": non_embedding_count(params),
      "flops_per_step": flops_per_step,
      "data": self.source.fingerprint,
      "eval_set": {
        "sequences": len(data.batch.inputs_BxL),
        "documents": data.documents,
        "bytes": data.bytes,
      },
    }
    settings, env = config_lib.to_dict(c), workdir_lib.environment(**facts)
    if self.hosts.first:
      env |= workdir_lib.changes(self.files, settings, env, self.at.step)
      workdir_lib.write_config(self.files, settings, env)
    overview = parameter_overview.get_parameter_overview(params, include_stats=False)
    self.say(f"{overview}\n{flops_per_step:.3g} FLOPs a step")
    self.writers = self.open_writers({**settings, workdir_lib.ENVIRONMENT: env})
    peak = flops.peak_flops(self.mesh.devices.flat[0].device_kind)
    self.flops = {True: flops_per_step, False: flops_unperturbed}  # by whether rho > 0
    self.spikes = health.SpikeDetector(c.guard.spike)
    self.diagnostics = Diagnostics(self.train_step, self.source) if c.diagnostics.every else None
    steps_to_trace = c.profile_steps if self.hosts.first else ""
    self.profiler = Profiler(self.files, steps_to_trace, say=self.say)
    self.meter = Meter(self.cost, peak * self.mesh.size if peak else None)  # last: it starts now

  def open_writers(self, config: dict[str, Any]) -> Writer:
    if not self.hosts.first:
      return FanOut([])
    return open_writers(
      self.files,
      config=config,
      run={**self.c.wandb, "tags": [tag for tag in self.c.wandb.tags.split(",") if tag]},
      wandb=self.c.wandb.mode,
      tensorboard=self.c.tensorboard,
      resume_step=self.at.step or None,
      say=self.say,
    )

  def at_end(self) -> bool:
    return self.at.step == self.c.opt.num_train_steps

  def finished(self) -> bool:
    return self.at_end() and self.at.evaluated == self.at.step

  def due(self, every: int) -> bool:
    return self.at.step > 0 and (self.at.step % every == 0 or self.at_end())

  def loop(self) -> None:
    pending: Pending | None = None
    while True:
      stopping = self.hosts.asked_to_stop(self.stop, self.at.step)
      evaluate = self.due(self.c.eval_every_steps) and self.at.evaluated != self.at.step
      save = self.due(self.c.checkpoint_every_steps) or stopping
      diagnose = self.due_for_diagnostics() and not stopping
      if pending and (evaluate or save or diagnose):
        self.log(pending)
        pending = None
      with self.meter.paused():
        if diagnose:
          self.diagnose()
        if evaluate and not stopping and not self.evaluate():
          continue
        if save:
          self.save()
      if self.finished() or stopping:
        return
      with self.meter.waiting_for_data():
        batch, epoch = next(self.stream), self.stream.epoch()
      self.at.step += 1
      on_devices = sharding.to_devices(batch, self.mesh)
      self.state, metrics = self.profiler.call(self.at.step, self.step_fn, self.state, on_devices)
      if pending:
        self.log(pending)  # of the step before: the device is busy while the host reads
      pending = Pending(self.at.step, metrics, batch, epoch)

  def log(self, pending: Pending) -> None:
    """Reads a finished step: the guard's verdict, the cost, and now and then a record."""
    step, metrics = pending.step, jax.device_get(pending.metrics)
    tokens = metrics.pop("tokens")
    if not health.check(self.c.guard, metrics):
      raise self.bad_step(pending, metrics)
    loss = float(metrics.get("train/loss", metrics.get("train/loss_perturbed")))
    if spike := self.spikes.update(loss):
      self.say(f"warning: step {step}: {spike}")
    self.meter.step(int(tokens), self.flops[bool(metrics["opt/rho"] > 0)])
    if step % self.c.log_every_steps == 0 or step in (1, self.c.opt.num_train_steps):
      if self.checkpoints:
        self.checkpoints.check()  # a save that failed in the background
      self.workdir.check()
      values = {**metrics, **self.meter.read(), **self.data_metrics(pending)}
      self.writers.write(step, values)
      self.progress.update(step, loss=loss, tokens_per_sec=values["perf/tokens_per_sec"])

  def data_metrics(self, pending: Pending) -> dict[str, Any]:
    """How far the data has got, and a hash that proves which tokens a step saw."""
    first_row = sharding.local_rows(self.mesh, self.c.batch_size).start
    hashes = self.hosts.gather(batch_hash(pending.batch, first_row))
    return {"data/epoch": pending.epoch, "data/batch_hash": combine_hashes(hashes)}

  def bad_step(self, pending: Pending, metrics: dict[str, Any]) -> errors.UserError:
    self.writers.write(pending.step, metrics)
    text = health.report(
      pending.step, metrics, self.train_step.model, self.state.params, pending.batch, self.mesh
    )
    if self.checkpoints:
      self.checkpoints.wait()
    steps = self.checkpoints.steps() if self.checkpoints else []
    return health.bad_step_error(text, steps[-1] if steps else None, self.c.guard, metrics)

  def evaluate(self) -> bool:
    """False if it was interrupted: the same command evaluates at this step first."""
    try:
      evaluation = self.evaluator(self.state.params, stop=self.stop)
    except Stopped:
      return False
    step = self.at.step
    if self.hosts.first:
      evaluation.save(self.files / workdir_lib.SEQUENCES_FILE, step)
    # Last, since the record is what tells a restart that this evaluation is done.
    self.writers.write(step, {**evaluation.metrics(), **dataclasses.asdict(self.meter.cost)})
    self.at.book(step, evaluation.loss)
    self.say(f"step {step}  {evaluation}")
    return True

  def due_for_diagnostics(self) -> bool:
    """From step 0 on: the first steps are when tau changes most."""
    every, step = self.c.diagnostics.every, self.at.step
    return bool(every) and (step % every == 0 or self.at_end()) and self.at.diagnosed != step

  def diagnose(self) -> None:
    assert self.diagnostics is not None
    self.writers.write(self.at.step, self.diagnostics(self.state))
    self.at.diagnosed = self.at.step

  def save(self) -> None:
    if self.checkpoints is None or self.at.step in (0, *self.checkpoints.steps()):
      return
    self.checkpoints.save(
      self.at.step,
      self.state,
      run={
        "cost": dataclasses.asdict(self.meter.cost),
        "data": merge_states(self.hosts.gather(self.stream.state())),
      },
      eval_loss=self.at.last_eval_loss if self.at.evaluated == self.at.step else None,
      after=self.workdir.upload(),
    )

  def close(self, exit_code: int) -> None:
    with contextlib.ExitStack() as stack:  # from the last to the first, even if one fails
      stack.callback(self.progress.close)
      stack.callback(self.writers.close, exit_code)
      if self.at.evaluated:
        best, last = self.at.best_eval_loss, self.at.last_eval_loss
        stack.callback(self.writers.summary, {"best_eval_loss": best, "last_eval_loss": last})
      if self.checkpoints and not self.hosts.broken:
        stack.callback(self.checkpoints.close)
      stack.callback(self.stream.close)
      stack.callback(self.profiler.close)
