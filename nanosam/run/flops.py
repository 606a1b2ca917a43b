"""Counts the FLOPs of a traced function, and knows what devices can do.

XLA's own cost analysis counts the body of a loop once. Here loops are multiplied by their trip
counts, so scanned layers, chunked heads and microbatches come out right. Only matrix products
count, the convention behind published utilisation figures; cuDNN's attention counts as the products
that it stands for, forward and backward.

The count is of the program as traced. With one microbatch XLA then finds that logit_sam, angle_sam
and penalty_sam compute parts of the first pass again, and merges them: for these it is an upper
bound on what runs.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.interpreters.partial_eval import dce_jaxpr


class Device(NamedTuple):
  kind: str  # what `device_kind` begins with
  peak: float  # dense bf16 FLOP/s, from the vendor's data sheet
  gib: float = 0.0  # of its memory, what the TPUs' compiler lets a program have
  grid: str = ""  # of TPUs, one that can be rented


DEVICES = {
  "v4": Device("TPU v4", 275e12, 30.75, "2x2x1"),
  "v5e": Device("TPU v5 lite", 197e12, 15.75, "2x4"),
  "v5p": Device("TPU v5", 459e12, 95.74, "2x2x1"),
  "v6e": Device("TPU v6 lite", 918e12, 31.25, "2x4"),
  "a100": Device("NVIDIA A100", 312e12),
  "h100": Device("NVIDIA H100", 989e12),  # SXM
  "h100-pcie": Device("NVIDIA H100 PCIe", 756e12),
  "h100-nvl": Device("NVIDIA H100 NVL", 835e12),
  "h200": Device("NVIDIA H200", 989e12),
}


def peak_flops(device_kind: str) -> float | None:
  found = [device for device in DEVICES.values() if device_kind.startswith(device.kind)]
  return max(found, key=lambda device: len(device.kind)).peak if found else None


def count(jaxpr: Any, branch: Callable[[Iterable[int]], int] = max) -> int:
  """FLOPs of the matrix products in a (closed) jaxpr, dead code left out.

  `branch` says which side of a conditional counts.
  """
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return _count(jaxpr, branch)


def mean(jaxpr: Any, share: float) -> float:
  """FLOPs of a step on average, if this share of the steps takes the longer way."""
  least = count(jaxpr, branch=min)
  return least + share * (count(jaxpr) - least)


def _count(jaxpr: Any, branch: Callable[[Iterable[int]], int]) -> int:
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  total = 0
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
      total += _dot(eqn)
    elif name.startswith("dot_product_attention_"):
      total += _attention(eqn)
    elif name == "scan":
      total += params["length"] * _count(params["jaxpr"], branch)
    elif name == "cond":
      total += branch([_count(b, branch) for b in params["branches"]])
    else:  # jit, remat, custom derivatives and the like: once each
      total += sum(_count(inner, branch) for inner in _inner(params))
  return total


def _dot(eqn: Any) -> int:
  if not eqn.outvars[0].aval.shape:
    return 0  # of two vectors: a metric, no matrix product
  (contracted, _), _ = eqn.params["dimension_numbers"]
  lhs = eqn.invars[0].aval.shape
  return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contracted)


def _attention(eqn: Any) -> int:
  """Of cuDNN's primitive, by shape: q k^T and the product with v; backward twice that, as the
  derivatives of the plain form have (what the kernel recomputes does not count)."""
  query, key = (x.aval.shape for x in eqn.invars[:2])  # BLHK, or BHLK
  forward = 4 * math.prod(query) * key[2 if eqn.params["layout"] else 1]
  return forward * (2 if "_bwd" in eqn.primitive.name else 1)


def _inner(params: dict[str, Any]) -> list[Any]:
  values = [
    v for value in params.values() for v in (value if isinstance(value, tuple) else (value,))
  ]
  return [v for v in values if hasattr(v, "eqns") or hasattr(getattr(v, "jaxpr", None), "eqns")]
