"""A config's train step compiled for chips that are not here: its memory, FLOPs and collectives."""

import math
import os
import re
import time
from typing import Any

import jax
import ml_collections
import psutil
from jax.experimental import topologies

from nanosam.model import sharding
from nanosam.run import flops, gpus, hlo
from nanosam.run.step import TrainStep
from nanosam.run.validate import check_devices
from nanosam.system.errors import UsageError, UserError

GIB = 2**30
REMEDIES = "try model.remat=True, more grad_accumulation_steps, or more chips"
# libtpu looks for the machine it runs on, and here there is none.
LIBTPU_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_LOG_DIR": "disabled",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip to fight over
}


def known_topologies() -> str:
  grids = ", ".join(f"{name}:{chip.grid}" for name, chip in flops.DEVICES.items() if chip.grid)
  return f"a grid of chips such as {grids}, one of gpu:{'|'.join(gpus.GPUS)}, or cpu:8"


def devices_of(topology: str) -> tuple[list[Any], int]:
  """Devices to compile for, and the memory that each gives to a program."""
  name, _, grid = topology.partition(":")
  jax.config.update("jax_platforms", "cpu")  # whatever this machine has, nothing runs on it
  if name == "cpu" and grid.isdigit() and int(grid):
    flags = os.environ.get("XLA_FLAGS", "")  # of which the last counts
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={grid}".strip()
    return jax.devices(), psutil.virtual_memory().total // int(grid)
  if name == "gpu" and grid in gpus.GPUS:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {gpus.FLAGS}".strip()
    return jax.devices()[:1], gpus.pool_bytes(gpus.GPUS[grid])
  chip = flops.DEVICES.get(name)
  if not (chip and chip.grid and re.fullmatch(r"\d+(x\d+)*", grid)):
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
  return devices, int(chip.gib * GIB)


def measure(
  c: ml_collections.ConfigDict, vocab_size: int, devices: list[Any], hbm_bytes: int, topology: str
) -> dict[str, Any]:
  """One step on one device, for JSON."""
  mesh = sharding.make_mesh(c.mesh.data, c.mesh.fsdp, devices)
  check_devices(c, sharding.shards(mesh))
  train_step = TrainStep(c, vocab_size, mesh)
  traced = train_step.trace()
  start = time.monotonic()
  arguments, peak, moved = compile_step(traced, train_step)
  name, _, gpu = topology.partition(":")
  on_gpu = gpus.estimate(c, arguments, peak) if name == "gpu" else {}
  peak = on_gpu.get("peak_bytes_per_device", peak)
  return {
    "method": c.opt.method,
    "topology": topology,
    "devices": len(devices),
    "device_kind": f"NVIDIA {gpu}" if on_gpu else devices[0].device_kind,
    "mesh": dict(mesh.shape),
    "parameters": sum(x.size for x in jax.tree.leaves(train_step.abstract_params)),
    "vocab_size": vocab_size,
    "argument_bytes_per_device": arguments,  # state and batch
    "temp_bytes_per_device": peak - arguments,  # beside the arguments, at the peak
    "peak_bytes_per_device": peak,
    "hbm_bytes_per_device": hbm_bytes,
    "fits": peak <= hbm_bytes,
    "memory_of_method_bytes_per_device": remembered(train_step),
    "flops_per_device": train_step.mean_flops(traced) / len(devices),
    "collective_bytes_per_device": None if moved is None else sum(moved.values()),
    "collective_bytes_by_kind": moved,  # None: the compiler gave up for want of memory
    "compile_seconds": time.monotonic() - start,
    **on_gpu,
  }


def remembered(train_step: TrainStep) -> int:
  """Bytes of what the method remembers from step to step; part of the arguments."""
  return sum(map(shard_bytes, jax.tree.leaves(train_step.abstract_state.memory)))


def compile_step(traced: Any, train_step: TrainStep) -> tuple[int, int, dict[str, int] | None]:
  """Bytes of the arguments, at the peak, and moved by collectives; the latter only if it fits."""
  lowered = traced.lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as e:
    peak = bytes_needed(str(e))
    if peak is None:
      raise UserError(f"the compiler failed: {' '.join(str(e).split())[:500]}") from e
    arguments = jax.tree.leaves((train_step.abstract_state, train_step.abstract_batch()))
    return sum(map(shard_bytes, arguments)), peak, None
  memory = compiled.memory_analysis()
  peak = peak_bytes(memory, train_step.mesh.devices.flat[0].platform)
  return memory.argument_size_in_bytes, peak, hlo.collective_bytes(compiled.as_text())


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
