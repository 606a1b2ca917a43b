"""Benchmarks, as ratios within one run: absolute times mean little on a shared machine.

python scripts/benchmark.py step [--size=2M --batch_size=8 --length=256 --methods=... --json]
python scripts/benchmark.py data [...]
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nanosam import config as config_lib
from nanosam import errors, flops, sharding
from nanosam.command import Parser
from nanosam.data.batch import Batch
from nanosam.model import Transformer, unembedding
from nanosam.optim import guard
from nanosam.optim.gradient import Estimate
from nanosam.optim.registry import METHODS
from nanosam.step import Trainer, model_config
from nanosam.validate import validate

DENSE = "dense"  # a plain flax/optax AdamW step: all logits at once, loss by autodiff
UNGUARDED = "unguarded"  # our adamw without the check that loss and gradient are finite


def main(argv: list[str]) -> None:
  if argv[1:2] == ["data"]:
    from nanosam.data import benchmark

    return benchmark.main(argv[1:])
  if argv[1:2] != ["step"]:
    raise errors.UsageError("say what to measure: benchmark.py step or benchmark.py data")
  args = parser().parse_args(argv[2:])
  rows = measure(args)
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
  times: dict[str, list[float]] = {name: [] for name in names}
  for round_number in range(args.rounds + 1):
    for name in names:
      seconds = programs[name].step()
      if round_number:  # the first one warms up
        times[name].append(seconds)

  def ratio(name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))

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


class Program:
  """A compiled step with a state of its own."""

  def __init__(self, name: str, args: argparse.Namespace):
    mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])
    self.trainer = Trainer(benchmark_config(name, args), args.vocab_size, mesh)
    self.state: Any = self.trainer.init(0)
    with mock.patch.object(guard, "judge", trust) if name == UNGUARDED else nullcontext():
      traced = self.trainer.trace()
    if name == DENSE:
      traced, self.state = dense_step(self.trainer, self.state.params)
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


def trust(_, estimated: Estimate, counts: guard.Counts) -> guard.Verdict:
  """A guard that looks at nothing: what it costs to look is the difference."""
  norms = guard.norms_by_group(estimated.gradient)
  return guard.Verdict(estimated.gradient, norms, jnp.array(True), counts)


def dense_step(trainer: Trainer, params: Any) -> Any:
  """What one would write with flax and optax alone: the traced step and its state."""
  o = trainer.config.opt
  model = Transformer(model_config(trainer.config, len(unembedding(params))))
  optimizer = optax.adamw(1e-3, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay)

  def step(state, batch):
    params, opt_state = state

    def loss_fn(params):
      h_BxLxD = model.apply({"params": params}, batch.inputs_BxL)
      logits_BxLxV = h_BxLxD.astype(jnp.float32) @ unembedding(params).T
      losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch.targets_BxL)
      return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"train/loss": loss}

  state = params, optimizer.init(params)
  return jax.jit(step, donate_argnums=0).trace(state, trainer.abstract_batch()), state


def table(rows: list[dict[str, Any]]) -> str:
  names = ["method", *(k for k in rows[0] if k != "method")]
  lines = ["  ".join(f"{n:>20}" for n in names)]
  lines += [
    "  ".join(f"{r[n]:>20}" if n == "method" else f"{r[n]:>20.3f}" for n in names) for r in rows
  ]
  return "\n".join(lines)


if __name__ == "__main__":
  errors.run(main)
