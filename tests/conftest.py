"""Every test sees eight CPU devices; meshes take as many of them as they want."""

import os
import signal

# Little optimization: the programs are tiny, compiling them is what takes the time.
os.environ.setdefault(
  "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from helpers.training import Commands

from nanosam import config as config_lib

# A shell ignores ctrl-C on behalf of what it runs in the background; our processes must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def strict_shapes():
  with jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
  """Where the embedded corpus and compiled code go: made once, and not in the home of anybody."""
  root = tmp_path_factory.getbasetemp()
  folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "nanosam_cache"
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("NANOSAM_CACHE", str(folder))
    yield folder


@pytest.fixture(scope="session")
def commands(cache):
  """Commands in processes of their own; the tiny config of tests/helpers/tiny_config.py."""
  return Commands(cache)


@pytest.fixture(scope="session")
def whole(commands, tmp_path_factory):
  """A run that nothing disturbed: 16 steps, evaluated at 8 and 16, checkpoints 12 and 16."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  outcome = commands.train(workdir)
  assert outcome.code == 0, outcome.err
  return workdir


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def tiny_config(tmp_path):
  """Small enough to compile in a second, with every part in use."""
  c = config_lib.default(size="mini")
  c.workdir = str(tmp_path / "run")
  c.model.update(D=16, H=2, L=12, N=1, dtype="float32")
  c.batch_size = 8
  c.head.chunk = 5
  c.opt.num_train_steps = 8
  c.opt.warmup_steps = 2
  c.opt.peak_learning_rate = 1e-2
  return c
