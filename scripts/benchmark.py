"""Benchmarks, as ratios within one run: absolute times mean little on a shared machine.

python scripts/benchmark.py step [--size=2M --batch_size=8 --length=256 --methods=... --json]
python scripts/benchmark.py curvature [the same, without methods]
python scripts/benchmark.py data [...]
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nanosam import config as config_lib
from nanosam.curvature import products
from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.transformer import Transformer, unembedding
from nanosam.optim import guard
from nanosam.optim.gradient import Metrics
from nanosam.optim.methods import METHODS
from nanosam.optim.passes import Passes
from nanosam.run import flops
from nanosam.run.step import TrainState, TrainStep, model_config
from nanosam.run.validate import validate
from nanosam.system import errors
from nanosam.system.command_line import Parser

DENSE = "dense"  # a plain flax/optax AdamW step: all logits at once, loss by autodiff
UNGUARDED = "unguarded"  # our adamw without the check that loss and gradient are finite


def main(argv: list[str]) -> None:
  if argv[1:2] == ["data"]:
    from nanosam.data import benchmark

    return benchmark.main(argv[1:])
  if argv[1:2] in (["-h"], ["--help"]):
    return print(__doc__)
  if argv[1:2] not in (["step"], ["curvature"]):
    raise errors.UsageError("say what to measure: benchmark.py step, curvature or data")
  args = parser().parse_args(argv[2:])
  rows = measure(args) if argv[1] == "step" else measure_curvature(args)
  print(json.dumps(rows, indent=2) if args.json else table(rows))


def parser() -> Parser:
  p = Parser("scripts/benchmark.py step", __doc__)
  p.add_argument("--size", default="2M", choices=config_lib.SIZES)
  p.add_argument("--batch_size", type=int, default=8)
  p.add_argument("--length", type=int, default=256)
  p.add_argument("--vocab_size", type=int, default=32_101)
  p.add_argument("--dtype", default="float32")
  p.add_argument("--chunk", type=int, default=32)
  p.add_argument("--residual", default="auto", help="store, recompute or auto")
  p.add_argument("--methods", default=",".join(METHODS))
  p.add_argument("--rounds", type=int, default=15)
  p.add_argument("--json", action="store_true")
  return p


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
  """One step of each method in turn, round after round; ratios are medians over rounds."""
  names = [DENSE, "adamw", UNGUARDED, *(m for m in args.methods.split(",") if m != "adamw")]
  programs = {name: Program(name, args) for name in names}
  times, ratio = interleaved({name: programs[name].step for name in names}, args.rounds)

  def row(name: str) -> dict[str, Any]:
    program, adamw, dense = programs[name], programs["adamw"], programs[DENSE]
    return {
      "method": name,
      "time_ratio": ratio(name, "adamw"),
      "fastest_ratio": min(times[name]) / min(times["adamw"]),  # what others do only slows down
      "memory_ratio": program.peak_bytes / adamw.peak_bytes,
      "flops_ratio": program.flops / adamw.flops,
      "time_ratio_to_dense": ratio(name, DENSE),
      "temp_ratio_to_dense": program.temp_bytes / dense.temp_bytes,
      "seconds": statistics.median(times[name]),
      "peak_mib": program.peak_bytes / 2**20,
      "temp_mib": program.temp_bytes / 2**20,
    }

  return [row(name) for name in names]


def interleaved(
  programs: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, list[float]], Callable[[str, str], float]]:
  """Times of each program, and the median over rounds of the ratio of two."""
  times: dict[str, list[float]] = {name: [] for name in programs}
  for round_number in range(rounds + 1):
    order = list(programs)[:: -1 if round_number % 2 else 1]  # whoever is before leaves its caches
    for name in order:
      seconds = programs[name]()
      if round_number:  # the first one warms up
        times[name].append(seconds)

  def ratio(name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))

  return times, ratio


GRADIENT = "gradient"
PRODUCTS = {
  "H v": lambda passes, v: products.product(passes, products.HESSIAN, v),
  "H_G v": lambda passes, v: products.product(passes, products.GAUSS_NEWTON, v),
  "H_F v": lambda passes, v: products.product(passes, products.FUNCTIONAL, v),
  "v H_G v, v H_F v": products.quadratic_forms,
}


def measure_curvature(args: argparse.Namespace) -> list[dict[str, Any]]:
  """Products with the Hessian and its parts, against one gradient of the same batch."""
  program = Program("adamw", args)
  net = products.exact_net(program.train_step.config, args.vocab_size)
  params, batch = program.state.params, program.batch
  vector_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
  functions = {GRADIENT: lambda passes, _: passes.plain()[1], **PRODUCTS}
  traced = {
    name: jax.jit(lambda p, b, v, f=f: f(Passes(net, p, b), v)).trace(params, batch, params)
    for name, f in functions.items()
  }
  compiled = {name: t.lower().compile() for name, t in traced.items()}

  def seconds(name: str) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled[name](params, batch, params))
    return time.perf_counter() - start

  _, ratio = interleaved({n: functools.partial(seconds, n) for n in functions}, args.rounds)
  temps = {n: c.memory_analysis().temp_size_in_bytes for n, c in compiled.items()}
  costs = {n: flops.count(t.jaxpr) for n, t in traced.items()}
  return [
    {
      "method": name,
      "time_ratio": ratio(name, GRADIENT),
      "flops_ratio": costs[name] / costs[GRADIENT],
      "temp_ratio": temps[name] / temps[GRADIENT],
      "temp_mib": temps[name] / 2**20,
      "vector_mib": vector_bytes / 2**20,
    }
    for name in functions
  ]


class Program:
  """A compiled step with a state of its own."""

  def __init__(self, name: str, args: argparse.Namespace):
    mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
    kind = UnguardedStep if name == UNGUARDED else TrainStep
    self.train_step = kind(benchmark_config(name, args), args.vocab_size, mesh)
    self.state: Any = self.train_step.init(0)
    traced = self.train_step.trace()
    if name == DENSE:
      traced, self.state = dense_step(self.train_step, self.state.params)
    self.compiled = traced.lower().compile()
    self.flops = flops.count(traced.jaxpr)
    memory = self.compiled.memory_analysis()
    self.temp_bytes = memory.temp_size_in_bytes
    self.peak_bytes = (
      memory.temp_size_in_bytes
      + memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
    )
    tokens = np.random.default_rng(0).integers(
      0, args.vocab_size, (args.batch_size, args.length + 1), dtype=np.int32
    )
    weights = np.ones((args.batch_size, args.length), np.float32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights, None)
    self.batch = sharding.to_devices(batch, mesh)

  def step(self) -> float:
    start = time.perf_counter()
    self.state, metrics = self.compiled(self.state, self.batch)
    jax.block_until_ready((self.state, metrics))
    return time.perf_counter() - start


def benchmark_config(name: str, args: argparse.Namespace) -> Any:
  method = "adamw" if name in (DENSE, UNGUARDED) else name
  c = config_lib.default(size=args.size, method=method)
  c.workdir = "unused"
  c.batch_size = args.batch_size
  c.model.L = args.length
  c.model.dtype = args.dtype
  c.head.chunk = args.chunk
  c.head.residual = args.residual
  validate(c)
  return c


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
    return TrainState(state.step + 1, params, opt_state, state.guard), estimated.metrics | norms


def dense_step(train_step: TrainStep, params: Any) -> Any:
  """What one would write with flax and optax alone: the traced step and its state."""
  o = train_step.config.opt
  model = Transformer(model_config(train_step.config, len(unembedding(params))))
  optimizer = optax.adamw(1e-3, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay)

  def step(state, batch):
    params, opt_state = state

    def loss_fn(params):
      h_BxLxD: Any = model.apply({"params": params}, batch.inputs_BxL)
      logits_BxLxV = h_BxLxD.astype(jnp.float32) @ unembedding(params).T
      losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch.targets_BxL)
      return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"train/loss": loss}

  state = params, optimizer.init(params)
  return jax.jit(step, donate_argnums=0).trace(state, train_step.abstract_batch()), state


def table(rows: list[dict[str, Any]]) -> str:
  names = ["method", *(k for k in rows[0] if k != "method")]
  lines = ["  ".join(f"{n:>20}" for n in names)]
  lines += [
    "  ".join(f"{r[n]:>20}" if n == "method" else f"{r[n]:>20.3f}" for n in names) for r in rows
  ]
  return "\n".join(lines)


if __name__ == "__main__":
  errors.run(main)
