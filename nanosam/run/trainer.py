"""Trains one run: restores or starts it, opens what the loop needs, then loops to the last step."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
from clu import parameter_overview

from nanosam import config as config_lib
from nanosam.data.batch import Batch, StreamOptions, batch_hash, combine_hashes
from nanosam.data.sources import Source, eval_set, merge_states, source_of
from nanosam.model import sharding
from nanosam.model.transformer import non_embedding_count
from nanosam.optim import base
from nanosam.optim.gradient import PERTURBED
from nanosam.optim.guard import Counts, must_abort
from nanosam.run import flops, health, record, runtime
from nanosam.run.checkpoint import Checkpoints, found_steps
from nanosam.run.cluster import Hosts, joined
from nanosam.run.evaluation import Evaluator, Stopped
from nanosam.run.log import FanOut, open_writers
from nanosam.run.meter import Cost, Meter
from nanosam.run.profiling import Profiler
from nanosam.run.record import Position
from nanosam.run.start import start
from nanosam.run.step import TrainState, TrainStep
from nanosam.run.validate import check_devices, check_source, validate
from nanosam.run.workdir import Workdir, open_workdir
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
  trainer = Trainer(c, workdir, stop, hosts)
  if trainer.finished():
    at = trainer.at
    trainer.say(f"{workdir} is finished: {at.step} steps, eval loss {at.last_eval_loss:.4f}")
    return None
  trainer.compile()
  trainer.open(make_diagnostics)
  return trainer


def train(c: ml_collections.ConfigDict, make_diagnostics: MakeDiagnostics) -> None:
  """A whole run, started or resumed; raises Interrupted if asked to stop."""
  validate(c)
  with StopRequest() as stop, joined(c.cluster, stop) as hosts:
    with stop.nothing_to_save():
      workdir = open_workdir(c.workdir, c.data.cache_dir, hosts)
    with contextlib.closing(workdir):
      with stop.nothing_to_save():
        trainer = open_trainer(c, workdir, stop, hosts, make_diagnostics)
      if trainer:
        trainer.run()


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


class Pending(NamedTuple):
  """A step under way on the device."""

  step: int
  metrics: dict[str, jax.Array]
  batch: Batch
  epoch: float  # of the data, after it


class Trainer:
  """A run in its workdir, and the training loop."""

  def __init__(
    self, c: ml_collections.ConfigDict, workdir: Workdir, stop: StopRequest, hosts: Hosts
  ):
    """Restores or starts the run."""
    self.c, self.workdir, self.stop, self.hosts = c, workdir, stop, hosts
    runtime.set_up_jax(c)
    mesh = sharding.make_mesh(c.mesh.data, c.mesh.fsdp)
    check_devices(c, sharding.shards(mesh))
    self.source = source_of(c.data)
    check_source(c, self.source.image_size)
    self.source.check_length(
      L=c.model.L, batch_size=c.batch_size, steps=c.opt.num_train_steps, repeat=c.data.repeat
    )
    self.train_step = TrainStep(c, self.source.outputs, mesh)
    self.progress = Progress(
      c.opt.num_train_steps,
      None if hosts.first else open(os.devnull, "w"),
      unit="images" if self.source.image_size else "tokens",
    )
    self.say = self.progress.note
    self.stream = self.source.train_stream(
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
    self.checkpoints = None
    if c.checkpoint:
      self.checkpoints = Checkpoints(workdir.home, c.max_to_keep, say=self.say, hosts=hosts)
    if hosts.first:
      steps = self.checkpoints.steps() if self.checkpoints else []
      _check_workdir(c, workdir, steps)
      if steps and record.has_record(workdir.files):
        record.check_data(workdir.files, c.data.source, self.source.fingerprint)
    stop.saved = lambda: bool(found_steps(workdir.home))
    abstract = self.train_step.abstract_state
    if self.checkpoints and (restored := self.checkpoints.restore_newest(abstract)):
      self.stream.restore(restored.run["data"])
      self.say(f"resuming {workdir} at step {restored.step}")
      found = dataclasses.asdict(record.position(workdir.files, restored.step))
      self.state, self.at = restored.state, Position(**hosts.from_first(found))
      self.cost = Cost(**restored.run["cost"])
      self.lineage = record.read_lineage(workdir.files) if hosts.first else None
    else:
      if hosts.first:
        record.refuse_finished(workdir.files)
      self.state, self.lineage = start(c, self.train_step, self.source, hosts)
      self.at, self.cost = Position(), Cost()

  def compile(self) -> None:
    """Compiles the step, and counts its FLOPs."""
    c, mesh = self.c, self.train_step.mesh
    self.eval_data = eval_set(self.source, c)
    self.evaluator = Evaluator(self.train_step.model, self.eval_data, c.eval_batch_size, mesh)
    kind = mesh.devices.flat[0].device_kind
    by = f" with {self.train_step.attention} attention" if c.model.attention == "auto" else ""
    self.say(f"{c.opt.method} on {mesh.size} x {kind}{by}; compiling the step")
    traced = self.train_step.trace()
    self.flops = flops.count(traced.jaxpr)
    self.flops_unperturbed = flops.count(traced.jaxpr, branch=min)  # without a second pass
    self.compiled = traced.lower().compile()
    params = self.train_step.abstract_params
    overview = parameter_overview.get_parameter_overview(params, include_stats=False)
    self.say(f"{overview}\n{self.flops:.3g} FLOPs a step")

  def open(self, make_diagnostics: MakeDiagnostics) -> None:
    """Opens the run's files and starts the clock."""
    c, mesh, first = self.c, self.train_step.mesh, self.hosts.first
    self.writers = self.open_writers() if first else FanOut([])
    self.diagnostics = None
    if c.diagnostics.every:
      self.diagnostics = make_diagnostics(self.train_step, self.source)
    self.profiler = Profiler(self.workdir.files, c.profile_steps if first else "", say=self.say)
    self.spikes = health.SpikeDetector(c.guard.spike)
    self.perturbations = health.PerturbationCheck()
    peak = flops.peak_flops(mesh.devices.flat[0].device_kind)
    self.meter = Meter(self.cost, peak * mesh.size if peak else None)  # it adds to the cost

  def open_writers(self) -> FanOut:
    """Writes config.json, then opens the writers, which show it too."""
    c, files, step = self.c, self.workdir.files, self.at.step
    params, data = self.train_step.abstract_params, self.eval_data
    environment = record.environment(
      parameters=int(parameter_overview.count_parameters(params)),
      non_embedding_parameters=non_embedding_count(params),
      flops_per_step=self.flops,
      data=self.source.fingerprint,
      coding=self.source.coding,
      **({record.WEIGHTS: weights.summary()} if (weights := self.source.weights) else {}),
      **({record.LINEAGE: self.lineage} if self.lineage else {}),
      eval_set={
        "sequences": len(data.batch.targets_BxL),
        "documents": data.documents,
        "bytes": data.bytes,
        **({"rows": c.eval_rows} if c.eval_rows != "packed" else {}),  # as in records before it
      },
    )
    return open_writers(
      files,
      config=record.write_config(files, config_lib.to_dict(c), environment, step),
      run={**c.wandb, "tags": [tag for tag in c.wandb.tags.split(",") if tag]},
      wandb=c.wandb.mode,
      tensorboard=c.tensorboard,
      resume_step=step or None,
      say=self.say,
    )

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
    uniform = math.log(self.source.outputs)
    if self.at.last_eval_loss > uniform:
      self.say(f"warning: the eval loss is above {uniform:.2f}, which guessing has")
    self.say(f"finished: {self.workdir}")

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
      self.state, metrics = self.profiler.call(self.at.step, self.compiled, self.state, on_devices)
      if pending:
        self.log(pending)  # the previous step: the device is busy while the host reads
      pending = Pending(self.at.step, metrics, batch, epoch)

  def log(self, pending: Pending) -> None:
    """Reads a finished step: the guard's verdict, the cost, and every few steps a record."""
    step, metrics = pending.step, jax.device_get(pending.metrics)
    tokens = metrics.pop("tokens")
    if must_abort(self.c.guard, Counts(*(metrics[f"guard/{name}"] for name in Counts._fields))):
      raise self.bad_step(pending, metrics)
    loss = float(metrics.get("train/loss", metrics.get("train/loss_perturbed")))
    if spike := self.spikes.update(loss):
      self.say(f"warning: step {step}: {spike}")
    for problem in self.perturbations.update(metrics):
      self.say(f"warning: step {step}: {problem}")
    perturbed = float(metrics.get(PERTURBED, 1))  # m-SAM: of the groups, some
    least = self.flops_unperturbed
    self.meter.step(int(tokens), least + perturbed * (self.flops - least))
    if step % self.c.log_every_steps == 0 or step in (1, self.c.opt.num_train_steps):
      if self.checkpoints:
        self.checkpoints.check()  # a save that failed in the background
      self.workdir.check()
      first_row = sharding.local_rows(self.train_step.mesh, self.c.batch_size).start
      hashes = self.hosts.gather(batch_hash(pending.batch, first_row))  # of the tokens it saw
      data = {"data/epoch": pending.epoch, "data/batch_hash": combine_hashes(hashes)}
      values = {**metrics, **self.meter.read(), **data}
      self.writers.write(step, values)
      self.progress.update(step, loss=loss, tokens_per_sec=values["perf/tokens_per_sec"])

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
    average = base.averaged(self.state.opt_state)
    try:
      evaluation = self.evaluator(self.state.params, stop=self.stop)
      averaged = self.evaluator(average, stop=self.stop) if average is not None else None
    except Stopped:
      return False
    step = self.at.step
    of_average = {"eval/loss_average": averaged.loss} if averaged else {}
    if self.hosts.first:
      evaluation.save(self.workdir.files / record.SEQUENCES_FILE, step)
    # Last, because the record is what tells a restart that this evaluation is done.
    cost = dataclasses.asdict(self.cost)
    self.writers.write(step, {**evaluation.metrics(), **of_average, **cost})
    self.at.add_evaluation(step, evaluation.loss)
    beside = f"  averaged weights {averaged.loss:.4f}" if averaged else ""
    self.say(f"step {step}  {evaluation}{beside}")
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
