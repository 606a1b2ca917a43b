"""Compiles a config's train step for chips that are not here: does it fit, and what will it cost?

python -m nanosam.plan --config=FILE.py[:k=v,...] [--config.KEY=VALUE ...] --topology=v5e:2x4
  [--vocab_size=32101] [--peak=FLOP/s] [--utilization=0.4] [--json]

The program is the one that trains, compiled by the chips' own compiler; nothing is executed and no
data is read. cpu:8 is this machine as eight devices. Bytes and FLOPs are those of one device and
one step; loops count as often as they run.
"""

import dataclasses
import json
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import psutil
from jax.experimental import topologies

from nanosam import config as config_lib
from nanosam import flops, hlo
from nanosam.model import sharding
from nanosam.step import Trainer
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UsageError, UserError
from nanosam.validate import check_devices, validate

GIB = 2**30


# Of a device's memory, the GiB that the compiler lets a program have; and a grid one can rent.
CHIPS = {
  "v4": (30.75, "2x2x1"),
  "v5e": (15.75, "2x4"),
  "v5p": (95.74, "2x2x1"),
  "v6e": (31.25, "2x4"),
}
REMEDIES = "try model.remat=True, more grad_accumulation_steps, or more chips"
# libtpu looks for the machine it runs on, and here there is none.
LIBTPU_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_LOG_DIR": "disabled",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip to fight over
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """One step on one device, unless it says otherwise."""

  method: str
  topology: str
  devices: int
  device_kind: str
  mesh: dict[str, int]
  parameters: int
  vocab_size: int
  argument_bytes_per_device: int  # state and batch
  temp_bytes_per_device: int  # beside the arguments, at the peak
  peak_bytes_per_device: int
  hbm_bytes_per_device: int
  fits: bool
  flops_per_device: float
  collective_bytes_per_device: int | None  # None: the compiler gave up for want of memory
  collective_bytes_by_kind: dict[str, int] | None
  compile_seconds: float


def main(argv: list[str]) -> None:
  args, rest = parser().parse_known_args(argv[1:])
  c = config_lib.from_command_line([argv[0], *rest])
  c.workdir = c.workdir or "unused"
  validate(c)
  if not 0 < args.utilization <= 1 or (args.peak or 1) <= 0:
    raise UsageError("--utilization must lie in (0, 1], and --peak above 0")
  devices, hbm_bytes = devices_of(args.topology)
  plan = measure(c, vocabulary(c, args.vocab_size), devices, hbm_bytes, args.topology)
  cost = run_cost(c, plan, args.peak, args.utilization)
  facts = {**dataclasses.asdict(plan), **cost}
  print(json.dumps(facts, indent=2) if args.json else report(c, plan, cost))


def parser() -> Parser:
  add = (p := Parser("python -m nanosam.plan", __doc__)).add_argument
  add("--topology", required=True, help=f"{known_topologies()}")
  add("--vocab_size", type=int, help="(default: the embedded corpus's own, or the reference's)")
  add("--peak", type=float, help="FLOP/s of a device (default: its data sheet's)")
  add("--utilization", type=float, default=0.4, help="of the peak (default 0.4)")
  add("--json", action="store_true")
  return p


def known_topologies() -> str:
  grids = ", ".join(f"{name}:{grid}" for name, (_, grid) in CHIPS.items())
  return f"a grid of chips such as {grids}, or cpu:8"


def vocabulary(c: ml_collections.ConfigDict, given: int | None) -> int:
  """The data may not be here yet, so it is not asked."""
  embedded = c.data.source == "embedded"
  return given or (c.data.vocab_size if embedded else config_lib.PAPER_VOCABULARY)


def devices_of(topology: str) -> tuple[list[Any], int]:
  """Devices to compile for, and the memory that each gives to a program."""
  name, _, grid = topology.partition(":")
  jax.config.update("jax_platforms", "cpu")  # whatever this machine has, nothing runs on it
  if name == "cpu" and grid.isdigit() and int(grid):
    flags = os.environ.get("XLA_FLAGS", "")  # of which the last counts
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={grid}".strip()
    return jax.devices(), psutil.virtual_memory().total // int(grid)
  if name not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", grid):
    raise UsageError(f"unknown topology '{topology}': write {known_topologies()}")
  os.environ.update(LIBTPU_ENVIRONMENT)
  settings: dict[str, Any] = {"chip_config_name": "megacore"} if name == "v4" else {}
  if re.fullmatch(r"1(x1)*", grid):
    settings["chips_per_host_bounds"] = (1, 1, 1)  # a host has four otherwise
  try:
    devices = topologies.get_topology_desc(topology, "tpu", **settings).devices
  except RuntimeError as e:
    if "not installed" in str(e):
      raise UserError(
        "libtpu, the TPUs' compiler, is not installed: pip install -e '.[plan]'"
      ) from e
    reason = " ".join(str(e).split()).removeprefix("INVALID_ARGUMENT: ")
    raise UsageError(f"topology '{topology}': {reason}; write {known_topologies()}") from e
  return devices, int(CHIPS[name][0] * GIB)


class Memory(NamedTuple):
  arguments: int
  temporaries: int
  peak: int


def measure(
  c: ml_collections.ConfigDict, vocab_size: int, devices: list[Any], hbm_bytes: int, topology: str
) -> Plan:
  mesh = sharding.make_mesh(c.mesh.data, c.mesh.fsdp, devices)
  check_devices(c, sharding.shards(mesh))
  trainer = Trainer(c, vocab_size, mesh)
  traced = trainer.trace()
  start = time.monotonic()
  memory, moved = compile_step(traced, trainer)
  return Plan(
    method=c.opt.method,
    topology=topology,
    devices=len(devices),
    device_kind=devices[0].device_kind,
    mesh=dict(mesh.shape),
    parameters=sum(x.size for x in jax.tree.leaves(trainer.abstract_params)),
    vocab_size=vocab_size,
    argument_bytes_per_device=memory.arguments,
    temp_bytes_per_device=memory.temporaries,
    peak_bytes_per_device=memory.peak,
    hbm_bytes_per_device=hbm_bytes,
    fits=memory.peak <= hbm_bytes,
    flops_per_device=flops.count(traced.jaxpr) / len(devices),
    collective_bytes_per_device=None if moved is None else sum(moved.values()),
    collective_bytes_by_kind=moved,
    compile_seconds=time.monotonic() - start,
  )


def compile_step(traced: Any, trainer: Trainer) -> tuple[Memory, dict[str, int] | None]:
  """What the step needs, and what its collectives move; the latter only if it fits."""
  lowered = traced.lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as e:
    peak = bytes_needed(str(e))
    if peak is None:
      raise UserError(f"the compiler failed: {' '.join(str(e).split())[:500]}") from e
    arguments = sum(
      map(shard_bytes, jax.tree.leaves((trainer.abstract_state, trainer.abstract_batch())))
    )
    return Memory(arguments, peak - arguments, peak), None
  arguments = compiled.memory_analysis().argument_size_in_bytes
  peak = peak_bytes(compiled.memory_analysis(), trainer.mesh.devices.flat[0].platform)
  moved = hlo.bytes_by_kind(hlo.collectives(compiled.as_text()))
  return Memory(arguments, peak - arguments, peak), moved


def peak_bytes(m: Any, platform: str) -> int:
  """The most that is alive at one time, arguments and program included.

  This is what the TPUs' compiler refuses a program by. It reports a larger sum of temporaries, of
  which some share memory; on a CPU that sum is all there is.
  """
  if platform == "tpu":
    return m.peak_memory_in_bytes + m.generated_code_size_in_bytes
  kept = m.output_size_in_bytes - m.alias_size_in_bytes  # outputs that are not updated arguments
  return m.argument_size_in_bytes + m.temp_size_in_bytes + kept + m.generated_code_size_in_bytes


def bytes_needed(message: str) -> int | None:
  """What a program that does not fit would take, arguments and all, as the compiler puts it."""
  used = re.search(r"(?:Used |HLO temporaries \()([\d.]+)([KMG])", message)
  return int(float(used[1]) * 1024 ** (1 + "KMG".index(used[2]))) if used else None


def shard_bytes(x: jax.ShapeDtypeStruct) -> int:
  assert x.sharding is not None
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def run_cost(
  c: ml_collections.ConfigDict, plan: Plan, peak: float | None, utilization: float
) -> dict[str, Any]:
  """The whole run, if its devices do `utilization` of `peak` FLOP/s; nothing if none is known."""
  peak = peak or flops.peak_flops(plan.device_kind)
  if peak is None:
    return {}
  hours = c.opt.num_train_steps * plan.flops_per_device / (peak * utilization) / 3600
  chips = {"hours": hours, "chip_hours": hours * plan.devices}
  return {
    "num_train_steps": c.opt.num_train_steps,
    "peak": peak,
    "utilization": utilization,
    **chips,
  }


def report(c: ml_collections.ConfigDict, plan: Plan, cost: dict[str, Any]) -> str:
  def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"

  mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  moved = plan.collective_bytes_by_kind
  collectives = "unknown" if moved is None else ", ".join(f"{k} {gib(v)}" for k, v in moved.items())
  lines = [
    f"{plan.method}, {plan.parameters / 1e6:.1f}M parameters, vocabulary {plan.vocab_size}, batch "
    f"{c.batch_size} x {c.model.L} in {c.grad_accumulation_steps} part(s)",
    f"{plan.topology}: {plan.devices} x {plan.device_kind}, mesh {mesh}",
    "a step, on each device:",
    f"  arguments    {gib(plan.argument_bytes_per_device)}",
    f"  temporaries  {gib(plan.temp_bytes_per_device)}",
    f"  peak         {gib(plan.peak_bytes_per_device)} of {gib(plan.hbm_bytes_per_device)}: "
    + ("fits" if plan.fits else f"DOES NOT FIT; {REMEDIES}"),
    f"  FLOPs        {plan.flops_per_device:.4g}",
    f"  collectives  {collectives or 'none'}",
    f"compiled in {plan.compile_seconds:.0f} s",
  ]
  if cost:
    lines.append(
      f"{cost['num_train_steps']} steps at {cost['utilization']:.0%} of {cost['peak']:.3g} FLOP/s: "
      f"{cost['hours']:.1f} hours, {cost['chip_hours']:.1f} chip-hours"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  errors.run(main)
