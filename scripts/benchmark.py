"""Benchmarks, as ratios within one run: absolute times mean little on a shared machine.

python scripts/benchmark.py step [--size=2M --batch_size=8 --length=256 --methods=... --json]
python scripts/benchmark.py curvature [the same, without methods]
python scripts/benchmark.py scoring [the same: losses by document against nanosam.evaluate]
python scripts/benchmark.py library [--batch_size=512 --rounds=15 --json]
python scripts/benchmark.py data [--input=GLOB --tokenizer=FILE --workers=2 --repeats=3 --json]
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import sentencepiece

import nanosam
from nanosam import config as config_lib
from nanosam.curvature import products
from nanosam.data import embedded
from nanosam.data.batch import Batch, StreamOptions
from nanosam.data.preparation import formats
from nanosam.data.preparation.inputs import expand
from nanosam.data.preparation.worker import Problems
from nanosam.data.sources import StoreSource, open_source
from nanosam.data.tokenizer import train_tokenizer
from nanosam.model import sharding
from nanosam.model.classifier import model_config
from nanosam.model.transformer import Transformer, unembedding
from nanosam.optim import guard
from nanosam.optim.gradient import Metrics
from nanosam.optim.methods import METHODS
from nanosam.optim.passes import Passes
from nanosam.run import flops
from nanosam.run.evaluation import Evaluator
from nanosam.run.footprint import peak_bytes
from nanosam.run.scoring import Scorer, document_losses
from nanosam.run.step import TrainState, TrainStep
from nanosam.run.validate import validate
from nanosam.study.tables import Table, plain
from nanosam.system import errors
from nanosam.system.command_line import Parser

DENSE = "dense"  # a plain flax/optax AdamW step: all logits at once, loss by autodiff
UNGUARDED = "unguarded"  # our adamw without the check that loss and gradient are finite
AVERAGED = "averaged"  # our adamw with an exponential average of its weights
Rows = list[dict[str, Any]]


def main(argv: list[str]) -> None:
  kinds = {
    "step": measure_steps,
    "curvature": measure_curvature,
    "scoring": measure_scoring,
    "library": measure_library,
    "data": measure_data,
  }
  kind = "".join(argv[1:2])
  if kind in ("-h", "--help"):
    return print(__doc__)
  if kind not in kinds:
    raise errors.UsageError(f"say what to measure: benchmark.py {', '.join(kinds)}")
  args = parser(kind).parse_args(argv[2:])
  rows = kinds[kind](args)
  print(json.dumps(rows, indent=2) if args.json else table(rows))


def parser(kind: str) -> Parser:
  add = (p := Parser(f"scripts/benchmark.py {kind}", __doc__)).add_argument
  add("--json", action="store_true")
  if kind == "data":
    add("--input", metavar="GLOB", help="files of text; default: the embedded corpus")
    add("--tokenizer", metavar="FILE", help="with --input")
    add("--text_field", default="text")
    add("--workers", type=int, default=2)
    add("--repeats", type=int, default=3)
    return p
  add("--rounds", type=int, default=15)
  if kind == "library":
    add("--batch_size", type=int, default=512)
    return p
  add("--size", default="2M", choices=config_lib.SIZES)
  add("--batch_size", type=int, default=8)
  add("--length", type=int, default=256)
  add("--vocab_size", type=int, default=32_101)
  add("--dtype", default="float32")
  add("--chunk", type=int, default=32)
  add("--residual", default="auto", help="store, recompute or auto")
  add("--methods", default=",".join(METHODS), help="also METHOD:KEY=VALUE, a key of section opt")
  return p


# What a person reads in another unit.
UNITS = {
  "tokens_per_sec": ("M tokens/s", 1e6),
  "text_bytes_per_sec": ("MB/s of text", 1e6),
  "peak_bytes": ("MiB at most", 2**20),
}


def table(rows: Rows) -> str:
  keys = list(dict.fromkeys(key for row in rows for key in row))
  units = [UNITS.get(key, (key, 1)) for key in keys]

  def cell(value: Any, unit: float) -> str:
    return f"{value / unit:.3f}" if isinstance(value, float | int) else value or ""

  cells = [
    [cell(row.get(key), unit) for key, (_, unit) in zip(keys, units, strict=True)] for row in rows
  ]
  return "\n".join(plain(Table([name for name, _ in units], cells)))


def interleaved(
  programs: Mapping[str, Callable[[], float]], rounds: int, warm_up: bool = True
) -> tuple[dict[str, list[float]], Callable[[str, str], float]]:
  """Times of each program, and the median over rounds of the ratio of two."""
  times: dict[str, list[float]] = {name: [] for name in programs}
  for round_number in range(0 if warm_up else 1, rounds + 1):
    order = list(programs)[:: 1 if round_number % 2 else -1]  # whoever is before leaves its caches
    for name in order:
      seconds = programs[name]()
      if round_number:  # the first one warms up
        times[name].append(seconds)

  def ratio(name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))

  return times, ratio


class Program:
  """A compiled function with arguments of its own, and what it takes; a call returns seconds."""

  def __init__(self, traced: Any, *arguments: Any, is_step: bool = True, share: float = 1.0):
    """`share`: of the calls that take the longer way; a call's cost is then a mean over a cycle."""
    self._compiled, self._arguments, self._is_step = traced.lower().compile(), arguments, is_step
    self._cycle = round(1 / share)
    self.flops = flops.mean(traced.jaxpr, share)
    memory = self._compiled.memory_analysis()
    self.temp_bytes = memory.temp_size_in_bytes
    self.peak_bytes = peak_bytes(memory, jax.default_backend())

  def __call__(self) -> float:
    start = time.perf_counter()
    for _ in range(self._cycle):
      found = jax.block_until_ready(self._compiled(*self._arguments))
      if self._is_step:  # which takes its state and returns the next
        self._arguments = found[0], *self._arguments[1:]
    return (time.perf_counter() - start) / self._cycle


# ---- step ----------------------------------------------------------------------------------------


def measure_steps(args: argparse.Namespace) -> Rows:
  """One step of each method in turn, round after round; ratios are medians over rounds."""
  names = [
    DENSE,
    "adamw",
    UNGUARDED,
    AVERAGED,
    *(m for m in args.methods.split(",") if m != "adamw"),
  ]
  programs = {name: make_program(name, args) for name in names}
  times, ratio = interleaved(programs, args.rounds)
  parameters = make_step("adamw", args).abstract_params
  parameter_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parameters))

  def row(name: str) -> dict[str, Any]:
    program, adamw, dense = programs[name], programs["adamw"], programs[DENSE]
    return {
      "method": name,
      "time_ratio": ratio(name, "adamw"),
      "fastest_ratio": min(times[name]) / min(times["adamw"]),  # what others do only slows down
      "memory_ratio": program.peak_bytes / adamw.peak_bytes,
      "copies_more": (program.peak_bytes - adamw.peak_bytes) / parameter_bytes,  # of the weights
      "flops_ratio": program.flops / adamw.flops,
      "time_ratio_to_dense": ratio(name, DENSE),
      "temp_ratio_to_dense": program.temp_bytes / dense.temp_bytes,
      "seconds": statistics.median(times[name]),
      "peak_mib": program.peak_bytes / 2**20,
      "temp_mib": program.temp_bytes / 2**20,
    }

  return [row(name) for name in names]


def make_program(name: str, args: argparse.Namespace) -> Program:
  step = make_step(name, args)
  batch = random_batch(step, args)
  if name == DENSE:
    return dense(step, batch)
  return Program(step.trace(), step.init(0), batch, share=step.recipe.when.share)


def plain_step(grad: Callable[..., Any], tx: Any, params: Any, batch: Any) -> Program:
  """A step as one would write it by hand; `grad` is like what nanosam.value_and_grad returns."""

  def step(state, batch):
    params, opt_state = state
    (value, metrics), g = grad(params, batch, opt_state)
    updates, opt_state = tx.update(g, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), (value, metrics)

  state = jax.tree.map(jnp.copy, (params, tx.init(params)))
  return Program(jax.jit(step, donate_argnums=0).trace(state, batch), state, batch)


def make_step(name: str, args: argparse.Namespace) -> TrainStep:
  plain = name in (DENSE, UNGUARDED, AVERAGED)
  method, _, setting = ("adamw" if plain else name).partition(":")
  c = config_lib.default(size=args.size, method=method)
  c.opt.average = "ema" if name == AVERAGED else "none"
  if setting:  # func_sam:ascent_fraction=0.25
    key, _, value = setting.partition("=")
    errors.need(key in c.opt, f"--methods={name}: there is no key opt.{key}")
    c.opt[key] = type(c.opt[key])(value)
  c.workdir = "unused"
  c.batch_size = args.batch_size
  c.model.update(L=args.length, dtype=args.dtype)
  c.head.update(chunk=args.chunk, residual=args.residual)
  validate(c)
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
  return (UnguardedStep if name == UNGUARDED else TrainStep)(c, args.vocab_size, mesh)


def random_batch(step: TrainStep, args: argparse.Namespace) -> Batch:
  B, L = args.batch_size, args.length
  tokens = np.random.default_rng(0).integers(0, args.vocab_size, (B, L + 1), dtype=np.int32)
  batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((B, L), np.float32), None)
  return sharding.to_devices(batch, step.mesh)


class UnguardedStep(TrainStep):
  """The same step and norms without the guard: what it costs is the difference."""

  def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    estimated, _ = self._estimate(state, batch)
    updates, opt_state = self.base.update(estimated.gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {
      **{f"grad_norm/{k}": x for k, x in guard.norms_by_group(estimated.gradient).items()},
      "opt/param_norm": optax.tree.norm(params),
      "opt/update_norm": optax.tree.norm(updates),
    }
    moved = {"params": params, "opt_state": opt_state}
    state = dataclasses.replace(state, step=state.step + 1, **moved)
    return state, estimated.metrics | norms


def dense(train_step: TrainStep, batch: Batch) -> Program:
  """What one would write with flax and optax alone."""
  o, params = train_step.config.opt, train_step.init(0).params
  model = Transformer(model_config(train_step.config, len(unembedding(params))))
  optimizer = optax.adamw(1e-3, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay)

  def loss(params, batch):
    h_BxLxD: Any = model.apply({"params": params}, batch.inputs)
    logits_BxLxV = h_BxLxD.astype(jnp.float32) @ unembedding(params).T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch.targets_BxL)
    return jnp.mean(losses), {}

  grad = jax.value_and_grad(loss, has_aux=True)
  return plain_step(lambda params, batch, _: grad(params, batch), optimizer, params, batch)


# ---- curvature: against one gradient of the same batch -------------------------------------------

GRADIENT = "gradient"
CURVATURE = {
  GRADIENT: lambda passes, _: passes.first()[1],
  "H v": lambda passes, v: products.product(passes, products.HESSIAN, v),
  "H_G v": lambda passes, v: products.product(passes, products.GAUSS_NEWTON, v),
  "H_F v": lambda passes, v: products.product(passes, products.FUNCTIONAL, v),
  "v H_G v, v H_F v": products.quadratic_forms,
}


def measure_curvature(args: argparse.Namespace) -> Rows:
  step = make_step("adamw", args)
  model = products.exact_model(step.config, args.vocab_size)
  params, batch = step.init(0).params, random_batch(step, args)

  def program(function: Callable[..., Any]) -> Program:
    traced = jax.jit(lambda p, b, v: function(Passes(model, p, b), v)).trace(params, batch, params)
    return Program(traced, params, batch, params, is_step=False)

  programs = {name: program(function) for name, function in CURVATURE.items()}
  _, ratio = interleaved(programs, args.rounds)
  base, vector_bytes = programs[GRADIENT], sum(x.nbytes for x in jax.tree.leaves(params))
  return [
    {
      "method": name,
      "time_ratio": ratio(name, GRADIENT),
      "flops_ratio": p.flops / base.flops,
      "temp_ratio": p.temp_bytes / base.temp_bytes,
      "temp_mib": p.temp_bytes / 2**20,
      "vector_mib": vector_bytes / 2**20,
    }
    for name, p in programs.items()
  ]


# ---- scoring: losses by document against an evaluation of the same rows --------------------------

SCORED_BATCHES = 8


def measure_scoring(args: argparse.Namespace) -> Rows:
  """Of the embedded corpus' validation split, with its own vocabulary."""
  source = cast(StoreSource, open_source("embedded", vocab_size=4096, cache_dir=""))
  args.vocab_size = source.outputs
  step = make_step("adamw", args)
  c, params = step.config, step.init(0).params
  c.eval_batch_size = args.batch_size
  rows = args.batch_size * SCORED_BATCHES
  data = source.validation(L=args.length, rows=rows, mask_documents=False)
  rows = len(data.batch.targets_BxL)
  evaluator = Evaluator(step.model, data, args.batch_size, step.mesh)
  split = source.store.split("validation")
  scorer = Scorer(step.model, split, source.tokenizer, c, step.mesh)

  def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

  programs = {
    "evaluate": lambda: timed(lambda: evaluator(params)),
    "scoring": lambda: timed(lambda: document_losses(scorer, params, rows)),
  }
  times, ratio = interleaved(programs, args.rounds)
  return [
    {
      "name": name,
      "speed_ratio": ratio("evaluate", name),
      "tokens_per_sec": rows * args.length / statistics.median(times[name]),
    }
    for name in programs
  ]


# ---- library: nanosam.value_and_grad against the same method written out for one model -----------

WIDTH, CLASSES, RHO = 512, 10, 0.1


def measure_library(args: argparse.Namespace) -> Rows:
  """An MLP with Adam; `by hand` has no guard, no metrics and no choice of method."""
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = [(WIDTH, WIDTH)] * 3 + [(WIDTH, CLASSES)]
  params = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys[1:], shapes, strict=True)]
  x_BxD = jax.random.normal(keys[0], (args.batch_size, WIDTH))
  batch = {"x": x_BxD, "y": jnp.arange(args.batch_size) % CLASSES}
  tx = optax.adam(1e-3)
  programs = {}
  for name in ("adamw", "sam", "func_sam", "precond_func_sam"):
    ours = nanosam.value_and_grad(mlp, mean_loss, method=name, rho=RHO)
    programs[name] = plain_step(ours, tx, params, batch)
    theirs = functools.partial(by_hand, name)
    programs[f"{name} by hand"] = plain_step(theirs, tx, params, batch)
  _, ratio = interleaved(programs, args.rounds)
  return [
    {
      "method": name,
      "time_ratio_to_by_hand": ratio(name, f"{name} by hand"),
      "time_ratio": ratio(name, "adamw"),
      "flops_ratio": programs[name].flops / programs["adamw"].flops,
      "memory_ratio_to_by_hand": programs[name].peak_bytes / programs[f"{name} by hand"].peak_bytes,
    }
    for name in programs
    if "by hand" not in name
  ]


def mlp(params: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
  x = batch["x"]
  for w in params[:-1]:
    x = jax.nn.gelu(x @ w)
  return x @ params[-1]


def mean_loss(z_BxK: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z_BxK, batch["y"]))


def by_hand(name: str, params: Any, batch: Any, opt_state: Any) -> Any:
  z, back = jax.vjp(lambda p: mlp(p, batch), params)
  value, residual = jax.value_and_grad(mean_loss)(z, batch)
  (g,) = back(residual)
  if name == "adamw":
    return (value, {}), g
  d = g
  if name == "precond_func_sam":
    adam = opt_state[0]  # whose second moment has yet to see g
    nu = jax.tree.map(lambda nu, g: 0.999 * nu + 0.001 * g**2, adam.nu, g)
    unbias = 1 - 0.999 ** (adam.count + 1)
    d = jax.tree.map(lambda g, nu: g / (jnp.sqrt(nu / unbias) + 1e-8), g, nu)
  norm = optax.tree.norm(d)
  there = jax.tree.map(lambda p, d: p + RHO / norm * d, params, d)
  z, back = jax.vjp(lambda p: mlp(p, batch), there)
  return (value, {}), back(jax.grad(mean_loss)(z, batch) if name == "sam" else residual)[0]


# ---- data: everything relative to SentencePiece's own batch encoding of the same text ------------

BATCH_SIZE, LENGTH = 256, 512
BATCHES = {"tokens": 100, "tfds": 10}  # read from each kind of source


def measure_data(args: argparse.Namespace) -> Rows:
  """`ratio` is the speed in tokens relative to SentencePiece with as many threads as workers."""
  if bool(args.input) != bool(args.tokenizer):
    raise errors.UsageError("--input and --tokenizer go together")
  with tempfile.TemporaryDirectory() as folder:
    scratch = pathlib.Path(folder)
    if not args.input:
      args.input, args.tokenizer = write_embedded(scratch)
    path = DataPath(scratch, args)
    programs = {"sentencepiece": path.encode, "prepare": path.prepare}
    tokens = dict.fromkeys(programs, path.num_tokens)
    for kind, batches in BATCHES.items():
      for name, workers in ((kind, 0), (f"{kind}, {args.workers} workers", args.workers)):
        programs[name] = functools.partial(path.read, kind, workers)
        tokens[name] = batches * BATCH_SIZE * LENGTH
    times, ratio = interleaved(programs, args.repeats, warm_up=False)
  seconds = {name: statistics.median(times[name]) for name in programs}
  rows: Rows = [
    {
      "name": name,
      "seconds": seconds[name],
      "tokens_per_sec": tokens[name] / seconds[name],
      "ratio": ratio("sentencepiece", name) * tokens[name] / path.num_tokens,
    }
    for name in programs
  ]
  for row in rows[:2]:
    row["text_bytes_per_sec"] = path.num_bytes / row["seconds"]
  rows[1]["peak_bytes"] = path.peak_bytes
  return rows


def write_embedded(scratch: pathlib.Path) -> tuple[str, str]:
  """The embedded corpus as a file, and a vocabulary for it."""
  documents = embedded.collect_documents()
  corpus, model = scratch / "corpus.jsonl", scratch / "tokenizer.model"
  corpus.write_text("\n".join(json.dumps({"text": d}) for d in documents))
  model.write_bytes(train_tokenizer(documents[:400], 4096, "unigram").model_bytes)
  return str(corpus), str(model)


class DataPath:
  """The stages from text to batches; the methods return seconds."""

  def __init__(self, scratch: pathlib.Path, args: argparse.Namespace):
    self._scratch, self._args, self._files = scratch, args, expand(args.input)
    usable = Problems(on_error="skip").without
    self._texts = [
      document.text
      for path in self._files
      for piece in usable(formats.pieces(path, args.text_field))
      for document in usable(formats.documents(piece, args.text_field))
    ]
    self._model = sentencepiece.SentencePieceProcessor(model_file=args.tokenizer)
    self.num_bytes = sum(len(t.encode()) for t in self._texts)
    self.num_tokens = sum(len(ids) for ids in self._model.encode(self._texts))
    self.peak_bytes, self._store = 0, ""

  def encode(self) -> float:
    started = time.perf_counter()
    self._model.encode(self._texts, num_threads=self._args.workers)
    return time.perf_counter() - started

  def prepare(self) -> float:
    """The whole command, with the start of Python."""
    args, self._store = self._args, f"{tempfile.mkdtemp(dir=self._scratch)}/store"
    command = [sys.executable, "-m", "nanosam.data.prepare", "--input", *self._files]
    command += [f"--tokenizer={args.tokenizer}", f"--text_field={args.text_field}"]
    command += [f"--workers={args.workers}", f"--output={self._store}"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
      self.peak_bytes = max(self.peak_bytes, tree_bytes(process.pid))
      time.sleep(0.05)
    if process.returncode:
      raise errors.UserError("prepare failed, so there is nothing to measure")
    return time.perf_counter() - started

  def read(self, kind: str, workers: int) -> float:
    source = open_source(f"{kind}:{self._store}", vocab_size=0, cache_dir="")
    options = StreamOptions(LENGTH, BATCH_SIZE, range(BATCH_SIZE), workers=workers)
    stream = source.train_stream(options)
    next(stream)  # waits for the workers to start
    started = time.perf_counter()
    for _ in range(BATCHES[kind]):
      next(stream)
    seconds = time.perf_counter() - started
    stream.close()
    return seconds


def tree_bytes(pid: int) -> int:
  """Resident memory of a process and its descendants; shared pages count several times."""
  try:
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))
  except psutil.Error:  # one of them has just ended
    return 0


if __name__ == "__main__":
  errors.run(main)
