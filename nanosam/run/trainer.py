"""Trains one run: restores or starts it, opens what the loop needs, then loops to the last step."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
from clu import parameter_overview

from nanosam import config as config_lib
from nanosam.data.batch import Batch, EvalSet, StreamOptions, batch_hash, combine_hashes
from nanosam.data.sources import Source, Stream, eval_set, merge_states, source_of
from nanosam.model import sharding
from nanosam.model.transformer import non_embedding_count
from nanosam.run import flops, health, record, runtime
from nanosam.run.checkpoint import Checkpoints, found_steps
from nanosam.run.cluster import Hosts
from nanosam.run.evaluation import Evaluator, Stopped
from nanosam.run.log import FanOut, Writer, open_writers
from nanosam.run.meter import Cost, Meter
from nanosam.run.profiling import Profiler
from nanosam.run.record import Position
from nanosam.run.step import TrainState, TrainStep
from nanosam.run.validate import check_devices, check_source
from nanosam.run.workdir import Workdir
from nanosam.system.errors import Interrupted, UsageError, UserError
from nanosam.system.progress import Progress
from nanosam.system.signals import StopRequest

Diagnostics = Callable[[TrainState], dict[str, float]]
MakeDiagnostics = Callable[[TrainStep, Source], Diagnostics]


def open_trainer(
  c: ml_collections.ConfigDict,
  workdir: Workdir,
  stop: StopRequest,
  hosts: Hosts,
  make_diagnostics: MakeDiagnostics,
) -> "Trainer | None":
  """Restores or starts the run, compiles its step and opens its files; None if it is finished.

  The order matters: what is wrong with the request or with the workdir shows before the compile,
  and config.json changes only after it.
  """
  session = _restore_or_init(c, workdir, hosts)
  train_step, at, say = session.train_step, session.at, session.progress.note
  if at.finished(c.opt.num_train_steps):
    say(f"{workdir} is finished: {at.step} steps, eval loss {at.last_eval_loss:.4f}")
    return None
  mesh = train_step.mesh
  kind = mesh.devices.flat[0].device_kind
  eval_data = eval_set(session.source, c)
  evaluator = Evaluator(train_step.model, eval_data, c.eval_batch_size, mesh)
  say(f"{c.opt.method} on {mesh.size} x {kind}; compiling the step")
  compiled = CompiledStep.of(train_step)
  params = train_step.abstract_params
  overview = parameter_overview.get_parameter_overview(params, include_stats=False)
  say(f"{overview}\n{compiled.flops:.3g} FLOPs a step")
  writers = _open_writers(session, eval_data, compiled) if hosts.first else FanOut([])
  peak = flops.peak_flops(kind)
  return Trainer(
    **vars(session),
    stop=stop,
    compiled=compiled,
    evaluator=evaluator,
    diagnostics=make_diagnostics(train_step, session.source) if c.diagnostics.every else None,
    writers=writers,
    profiler=Profiler(workdir.files, c.profile_steps if hosts.first else "", say=say),
    spikes=health.SpikeDetector(c.guard.spike),
    meter=Meter(session.cost, peak * mesh.size if peak else None),  # last: its clock starts now
  )


@dataclasses.dataclass
class Session:
  """A run in its workdir, new or restored; nothing is compiled yet."""

  c: ml_collections.ConfigDict
  workdir: Workdir
  hosts: Hosts
  source: Source
  train_step: TrainStep
  progress: Progress
  stream: Stream
  checkpoints: Checkpoints | None
  state: TrainState
  at: Position
  cost: Cost


def _restore_or_init(c: ml_collections.ConfigDict, workdir: Workdir, hosts: Hosts) -> Session:
  runtime.set_up_jax(c)
  mesh = sharding.make_mesh(c.mesh.data, c.mesh.fsdp)
  check_devices(c, sharding.shards(mesh))
  source = source_of(c.data)
  check_source(c, source.image_size)
  source.check_length(
    L=c.model.L, batch_size=c.batch_size, steps=c.opt.num_train_steps, repeat=c.data.repeat
  )
  train_step = TrainStep(c, source.outputs, mesh)
  progress = Progress(
    c.opt.num_train_steps,
    None if hosts.first else open(os.devnull, "w"),
    unit="images" if source.image_size else "tokens",
  )
  say = progress.note
  stream = source.train_stream(
    StreamOptions(
      L=c.model.L,
      batch_size=c.batch_size,
      rows=sharding.local_rows(mesh, c.batch_size),
      data_seed=c.data_seed,
      repeat=c.data.repeat,
      mask_documents=c.data.mask_documents,
      workers=c.data.workers,
      prefetch=c.data.prefetch,
    )
  )
  checkpoints = None
  if c.checkpoint:
    checkpoints = Checkpoints(workdir.home, c.max_to_keep, say=say, hosts=hosts)
  steps = checkpoints.steps() if checkpoints else []
  if hosts.first:
    _check_workdir(c, workdir, steps)
  if checkpoints and (restored := checkpoints.restore_newest(train_step.abstract_state)):
    stream.restore(restored.run["data"])
    say(f"resuming {workdir} at step {restored.step}")
    found = dataclasses.asdict(record.position(workdir.files, restored.step))
    state, at = restored.state, Position(**hosts.from_first(found))
    cost = Cost(**restored.run["cost"])
  else:
    if hosts.first:
      record.refuse_finished(workdir.files)
    state, at, cost = train_step.init(c.seed), Position(), Cost()
  return Session(
    c, workdir, hosts, source, train_step, progress, stream, checkpoints, state, at, cost
  )


def _check_workdir(c: ml_collections.ConfigDict, workdir: Workdir, steps: list[int]) -> None:
  """Refuses to lose what the workdir holds, or to mix it with something else."""
  if not c.checkpoint and found_steps(workdir.home):
    raise UsageError(
      f"{workdir} holds checkpoints, which a run with checkpoint=False would neither "
      "continue nor replace: use another workdir"
    )
  if steps or record.has_record(workdir.files):
    record.check_unchanged(workdir.files, config_lib.to_dict(c), c.allow_changed_keys)
  if steps and steps[-1] > (wanted := c.opt.num_train_steps):
    raise UsageError(
      f"{workdir} is at step {steps[-1]}, beyond opt.num_train_steps={wanted}: ask for "
      "more, or use another workdir"
    )


class CompiledStep(NamedTuple):
  call: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
  flops: float
  flops_unperturbed: float  # while rho is 0

  @classmethod
  def of(cls, train_step: TrainStep) -> "CompiledStep":
    traced = train_step.trace()
    counts = flops.count(traced.jaxpr), flops.count(traced.jaxpr, branch=min)
    return cls(traced.lower().compile(), *counts)

  def flops_at(self, rho: float) -> float:
    return self.flops if rho > 0 else self.flops_unperturbed


def _open_writers(session: Session, eval_data: EvalSet, compiled: CompiledStep) -> Writer:
  """Writes config.json, then opens the writers, which show it too."""
  c, files, step = session.c, session.workdir.files, session.at.step
  params = session.train_step.abstract_params
  environment = record.environment(
    parameters=int(parameter_overview.count_parameters(params)),
    non_embedding_parameters=non_embedding_count(params),
    flops_per_step=compiled.flops,
    data=session.source.fingerprint,
    eval_set={
      "sequences": len(eval_data.batch.targets_BxL),
      "documents": eval_data.documents,
      "bytes": eval_data.bytes,
    },
  )
  return open_writers(
    files,
    config=record.write_config(files, config_lib.to_dict(c), environment, step),
    run={**c.wandb, "tags": [tag for tag in c.wandb.tags.split(",") if tag]},
    wandb=c.wandb.mode,
    tensorboard=c.tensorboard,
    resume_step=step or None,
    say=session.progress.note,
  )


class Pending(NamedTuple):
  """A step under way on the device."""

  step: int
  metrics: dict[str, jax.Array]
  batch: Batch
  epoch: float  # of the data, after it


@dataclasses.dataclass
class Trainer(Session):
  """A session with a compiled step and open writers: the training loop."""

  stop: StopRequest
  compiled: CompiledStep
  evaluator: Evaluator
  diagnostics: Diagnostics | None
  writers: Writer
  profiler: Profiler
  spikes: health.SpikeDetector
  meter: Meter  # it adds to `cost`

  def run(self) -> None:
    """Trains to the last step and closes everything; raises Interrupted if asked to stop."""
    exit_code = UserError.exit_code
    try:
      self.loop()
      exit_code = 0 if self.finished() else Interrupted.exit_code
    except BaseException as e:
      self.hosts.report(e)
      raise
    finally:
      self.close(exit_code)
    if not self.finished():
      again = "resume" if self.c.checkpoint else "start over (config.checkpoint is off)"
      raise Interrupted(f"stopped at step {self.at.step}; run the same command to {again}")
    self.progress.note(f"finished: {self.workdir}")

  def finished(self) -> bool:
    return self.at.finished(self.c.opt.num_train_steps)

  def due(self, every: int, last: int) -> bool:
    """Whether it is time for what happens `every` so many steps, and happened at step `last`."""
    step = self.at.step
    at_end = step == self.c.opt.num_train_steps
    return step != last and every > 0 and (step % every == 0 or at_end)

  def loop(self) -> None:
    pending: Pending | None = None
    while True:
      stopping = self.hosts.asked_to_stop(self.stop, self.at.step)
      evaluate = self.due(self.c.eval_every_steps, last=self.at.evaluated)
      save = self.due(self.c.checkpoint_every_steps, last=0) or stopping
      diagnose = self.due(self.c.diagnostics.every, last=self.at.diagnosed) and not stopping
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
      on_devices = sharding.to_devices(batch, self.train_step.mesh)
      self.state, metrics = self.profiler.call(
        self.at.step, self.compiled.call, self.state, on_devices
      )
      if pending:
        self.log(pending)  # the previous step: the device is busy while the host reads
      pending = Pending(self.at.step, metrics, batch, epoch)

  def log(self, pending: Pending) -> None:
    """Reads a finished step: the guard's verdict, the cost, and every few steps a record."""
    step, metrics = pending.step, jax.device_get(pending.metrics)
    tokens = metrics.pop("tokens")
    if not health.check(self.c.guard, metrics):
      raise self.bad_step(pending, metrics)
    loss = float(metrics.get("train/loss", metrics.get("train/loss_perturbed")))
    if spike := self.spikes.update(loss):
      self.progress.note(f"warning: step {step}: {spike}")
    self.meter.step(int(tokens), self.compiled.flops_at(metrics["opt/rho"]))
    if step % self.c.log_every_steps == 0 or step in (1, self.c.opt.num_train_steps):
      if self.checkpoints:
        self.checkpoints.check()  # a save that failed in the background
      self.workdir.check()
      values = {**metrics, **self.meter.read(), **self.data_metrics(pending)}
      self.writers.write(step, values)
      self.progress.update(step, loss=loss, tokens_per_sec=values["perf/tokens_per_sec"])

  def data_metrics(self, pending: Pending) -> dict[str, Any]:
    """The passes over the data so far, and a hash that proves which tokens a step saw."""
    first_row = sharding.local_rows(self.train_step.mesh, self.c.batch_size).start
    hashes = self.hosts.gather(batch_hash(pending.batch, first_row))
    return {"data/epoch": pending.epoch, "data/batch_hash": combine_hashes(hashes)}

  def bad_step(self, pending: Pending, metrics: dict[str, Any]) -> UserError:
    self.writers.write(pending.step, metrics)
    model, mesh = self.train_step.model, self.train_step.mesh
    rows = health.bad_rows(model, self.state.params, pending.batch, mesh)
    if self.checkpoints:
      self.checkpoints.wait()
    steps = self.checkpoints.steps() if self.checkpoints else []
    return health.bad_step_error(pending.step, metrics, rows, steps, self.c.guard)

  def evaluate(self) -> bool:
    """False if it was interrupted: the same command then evaluates at this step first."""
    try:
      evaluation = self.evaluator(self.state.params, stop=self.stop)
    except Stopped:
      return False
    step = self.at.step
    if self.hosts.first:
      evaluation.save(self.workdir.files / record.SEQUENCES_FILE, step)
    # Last, because the record is what tells a restart that this evaluation is done.
    self.writers.write(step, {**evaluation.metrics(), **dataclasses.asdict(self.cost)})
    self.at.add_evaluation(step, evaluation.loss)
    self.progress.note(f"step {step}  {evaluation}")
    return True

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
        "cost": dataclasses.asdict(self.cost),
        "data": merge_states(self.hosts.gather(self.stream.state())),
      },
      eval_loss=self.at.last_eval_loss if self.at.evaluated == self.at.step else None,
      after=self.workdir.upload(),
    )

  def close(self, exit_code: int) -> None:
    with contextlib.ExitStack() as stack:  # from the last to the first, even if one fails
      stack.callback(self.progress.close)
      best, last = self.at.best_eval_loss, self.at.last_eval_loss
      summary = {"best_eval_loss": best, "last_eval_loss": last} if self.at.evaluated else {}
      stack.callback(self.writers.close, exit_code, summary)
      if self.checkpoints and not self.hosts.broken:
        stack.callback(self.checkpoints.close)
      stack.callback(self.stream.close)
      stack.callback(self.profiler.close)
