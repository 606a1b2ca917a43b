"""Pretraining with sharpness-aware optimizers, and its core for any JAX model."""

from typing import Any

__version__ = "0.1.0"
_PUBLIC = {  # imported when used: a look at a config must not wait for JAX
  "METHODS": "nanosam.optim.methods",
  "MethodError": "nanosam.optim.methods",
  "value_and_grad": "nanosam.optim.transform",
  "hessian_vector_product": "nanosam.curvature.products",
  "tau": "nanosam.curvature.products",
  "load": "nanosam.run.restore",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
  if name not in _PUBLIC:
    raise AttributeError(f"module 'nanosam' has no attribute '{name}'")
  import importlib

  return getattr(importlib.import_module(_PUBLIC[name]), name)
