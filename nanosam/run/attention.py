"""What model.attention=auto means: cuDNN's kernel where it works, else XLA's."""

import ml_collections
from jax.sharding import Mesh

from nanosam.optim import methods

_LEAST_CAPABILITY = 8.0  # of a GPU, for cuDNN's kernel: Ampere


def resolved(c: ml_collections.ConfigDict, mesh: Mesh) -> ml_collections.ConfigDict:
  """The same config with the attention that these devices compute; the record keeps `auto`."""
  if c.model.attention != "auto":
    return c
  c = c.copy_and_resolve_references()
  c.model.attention = "cudnn" if _cudnn_works(c, mesh.devices.flat[0]) else "xla"
  return c


def _cudnn_works(c: ml_collections.ConfigDict, device: object) -> bool:
  types = c.model.dtype, c.opt.perturbed_dtype
  if "float32" in types or methods.resolve(c.opt)[1].derivative:
    return False
  try:
    return float(getattr(device, "compute_capability", 0)) >= _LEAST_CAPABILITY and _has_cudnn()
  except ValueError:  # AMD's have names: gfx90a
    return False


def _has_cudnn() -> bool:
  try:
    from jax._src.lib import cuda_versions  # what JAX itself asks

    return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
  except (ImportError, AttributeError, RuntimeError):
    return False
