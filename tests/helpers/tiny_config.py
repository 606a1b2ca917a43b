"""A run of a few seconds, and something that befalls it: NANOSAM_TEST_FAULT=WHAT@WHERE[:NUMBER].

WHAT   a signal (SIGTERM, SIGINT, SIGKILL; SIGINT+SIGINT for two; SIGTERM+pause: until JAX, which
       looks once a second, has seen it; group:SIGINT to all processes of the run, as from a
       terminal), full:BYTES: from then on no file may grow beyond that, or
       nan: a weight of the batch that is one
WHERE  compile; step:N, once its record is written and the checkpoints due are on disk; eval:N, in
       the midst of the N-th evaluation; saving:N, while the checkpoint of step N is incomplete;
       data:N, in the N-th batch (nan only)
"""

import importlib
import itertools
import os
import pathlib
import resource
import signal
import sys
import threading
import time

import jax

from nanosam import config
from nanosam.data import sources
from nanosam.run import evaluation, log, workdir


def get_config(arg=None):
  args = config.arguments(arg, size="mini", method="adamw")
  c = config.default(**args)
  c.model.update(D=16, H=2, L=32, N=1, dtype="float32")
  c.batch_size = 8
  c.opt.num_train_steps = 16
  c.opt.warmup_steps = 2
  c.opt.peak_learning_rate = 1e-2
  c.data.vocab_size = 512
  c.eval_every_steps = 8
  c.eval_steps = 4
  c.eval_batch_size = 16
  c.checkpoint_every_steps = 4
  c.log_every_steps = 1
  c.wandb.mode = "disabled"
  if module := os.environ.get("NANOSAM_TEST_IMPORT"):  # now, not some seconds into the run
    importlib.import_module(module)
  if seconds := os.environ.get("NANOSAM_TEST_TAKE_OVER"):
    workdir.TAKE_OVER_AFTER = float(seconds)
  if fault := os.environ.get("NANOSAM_TEST_FAULT"):
    what, _, where = fault.partition("@")
    name, _, number = where.partition(":")
    PLACES[name](lambda: strike(what), int(number or 0))
  return c


def strike(what):
  if what.startswith("full:"):
    limit = int(what.removeprefix("full:"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return
  for name in what.split("+"):
    if name == "pause":
      time.sleep(5)
      continue
    send = os.killpg if name.startswith("group:") else os.kill
    send(os.getpid(), getattr(signal, name.removeprefix("group:")))
    time.sleep(0.2)  # signals of one kind that are pending at the same time count once


def at_compile(act, _):
  compile_ = jax.stages.Lowered.compile

  def act_and_compile(self, *args, **kwargs):
    act()
    return compile_(self, *args, **kwargs)

  jax.stages.Lowered.compile = act_and_compile


def at_step(act, number):
  write = log.FanOut.write  # in every process of a run, though only the first has a file

  def write_and_act(self, step, values):
    write(self, step, values)
    if step == number and "train/loss" in values:
      wait_until(lambda: not list(checkpoints().glob("*tmp*")))
      act()

  log.FanOut.write = write_and_act


def at_eval(act, number):
  batches, calls = evaluation.Evaluator._batches, []

  def batches_and_act(self):
    calls.append(self)
    for place, batch in enumerate(batches(self)):
      yield batch
      if len(calls) == number and place == 1:
        act()

  evaluation.Evaluator._batches = batches_and_act


def at_saving(act, number):
  start = time.time()

  def watch():
    found = f"{number}.*tmp*/*/*"
    wait_until(lambda: any(written_since(start, p) for p in checkpoints().glob(found)))
    act()

  threading.Thread(target=watch, daemon=True).start()


def at_data(_, number):
  read, count = sources.StoreStream.__next__, itertools.count(1)

  def read_and_spoil(self):
    batch = read(self)
    if next(count) == number:
      weights_BxL = batch.weights_BxL.copy()
      weights_BxL[3, 7] = float("nan")
      batch = batch._replace(weights_BxL=weights_BxL)
    return batch

  sources.StoreStream.__next__ = read_and_spoil


def checkpoints():
  workdir = next(w.split("=")[1] for w in sys.argv if w.startswith("--config.workdir="))
  return pathlib.Path(workdir, "checkpoints")


def written_since(start, path):
  try:
    return path.stat().st_mtime > start
  except FileNotFoundError:
    return False


def wait_until(condition):
  deadline = time.monotonic() + 60
  while not condition():
    if time.monotonic() > deadline:
      raise TimeoutError("the moment for the fault never came")
    time.sleep(0.0005)


PLACES = {
  "compile": at_compile,
  "step": at_step,
  "eval": at_eval,
  "saving": at_saving,
  "data": at_data,
}
