"""Process-wide settings that every command needs."""

import os
import sys

import jax
import ml_collections
from absl import logging

from nanosam.data.sources import default_cache_dir
from nanosam.system.errors import UserError, first_line


def set_up_jax(c: ml_collections.ConfigDict) -> None:
  logging.set_verbosity(logging.FATAL)  # dependencies log failures that we report ourselves
  # With TPUs in the machine JAX has chosen them by now. Otherwise it would still try libtpu, which
  # may be installed for nanosam.plan.
  if "tpu" not in (jax.config.jax_platforms or ""):  # type: ignore[attr-defined]
    sys.modules["libtpu"] = None  # type: ignore[assignment]  # cannot be imported
    os.environ.pop("TPU_LIBRARY_PATH", None)  # set by its import, which JAX tries at once
  if c.deterministic:  # XLA reads its flags when the first device is used
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
  if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_compilation_cache_dir", os.fspath(default_cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as e:  # the latter without a word, for want of a plugin
    asked = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms  # type: ignore[attr-defined]
    raise UserError(
      f"JAX finds no device for JAX_PLATFORMS={asked} ({first_line(e)}): install '.[cuda]' or "
      "'.[tpu]', or set JAX_PLATFORMS=cpu"
    ) from e
