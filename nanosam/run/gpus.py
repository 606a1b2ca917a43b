"""GPUs that are not here: what a step takes on one, estimated from its compile for this CPU.

The arguments are exact. XLA's compiler for CPUs computes bfloat16 in float32 and holds what others
fuse away, so its temporaries are too large; with rematerialization much too large where it merges
the recomputation with the first pass, which depends on loops. How much less a TPU takes of the same
step was measured with the TPUs' own compiler. cuDNN's attention takes less again.
"""

import os
from typing import Any, NamedTuple

import ml_collections


class Gpu(NamedTuple):
  peak: float  # dense bf16 FLOP/s with fp32 sums, from the vendor's data sheet
  mib: int  # of memory, as nvidia-smi shows it


GPUS = {
  "A100-40GB": Gpu(312e12, 40_960),
  "A100-80GB": Gpu(312e12, 81_920),
  "H100-80GB": Gpu(989e12, 81_559),
  "H100-PCIe-80GB": Gpu(756e12, 81_559),
  "H200-141GB": Gpu(989e12, 143_771),
  "L4": Gpu(121e12, 23_034),
  "L40S": Gpu(362e12, 46_068),
  "RTX3090": Gpu(71e12, 24_576),
  "RTX4090": Gpu(165e12, 24_564),
}
POOL = 0.75  # of the memory, what JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"  # which trades memory for time


class Share(NamedTuple):
  """Of the temporaries of the CPU's program: what the TPU's has."""

  low: float
  high: float


# v5e against this compiler, 32 to 64 sequences of 512 tokens a device, vocabulary 32,101. Measured
# before plain attention with remat was computed a few heads at a time: measure REMAT again.
PLAIN = Share(0.41, 0.48)  # 2M with adamw and precond_func_sam, 23.9M with sam
# From 42.5M and 117.9M with adamw, sam and precond_func_sam (0.136 to 0.148) over 2M in eight
# microbatches (0.29) to 1208M, whose layers are scanned (0.47 and 0.61).
REMAT = Share(0.13, 0.61)


def pool_bytes(gpu: Gpu) -> int:
  fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or POOL)
  return int(gpu.mib * fraction) << 20


def estimate(c: ml_collections.ConfigDict, arguments: int, cpu_peak: int) -> dict[str, Any]:
  """The facts of a plan that follow from a peak on the CPU."""
  share = REMAT if c.model.remat else PLAIN
  low, high = (arguments + int((cpu_peak - arguments) * part) for part in share)
  return {
    "temp_bytes_per_device": high - arguments,
    "peak_bytes_per_device": high,  # what must fit
    "peak_bytes_range": [low, high],
    "estimate": True,
  }
