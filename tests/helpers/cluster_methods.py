"""A few steps of every method on a mesh over all processes' devices.

python tests/helpers/cluster_methods.py OUT COORDINATOR PROCESS (of two)
"""

import sys

import jax
import numpy as np

from helpers.batches import random_batch
from nanosam import config
from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.optim.methods import METHODS
from nanosam.run import cluster
from nanosam.run.step import TrainStep
from nanosam.system.signals import StopRequest

VOCAB = 96


def train(method: str, shape: tuple[int, int] = (2, 4)) -> dict[str, np.ndarray]:
  """Losses and final parameters."""
  c = config.default(size="mini", method=method)
  c.model.update(D=16, H=2, L=12, N=1, dtype="float32")
  c.batch_size = 8
  c.opt.num_train_steps, c.opt.warmup_steps, c.opt.peak_learning_rate = 8, 2, 1e-2
  mesh = sharding.make_mesh(*shape)
  train_step = TrainStep(c, VOCAB, mesh)
  state, step = train_step.init(c.seed), train_step.trace().lower().compile()
  rows = sharding.local_rows(mesh, c.batch_size)
  mine = slice(rows.start, rows.stop)
  losses = []
  for i in range(3):
    batch = jax.tree.map(np.asarray, random_batch(i, c.batch_size, c.model.L, VOCAB))
    local = Batch(*(x if x is None else x[mine] for x in batch))
    state, metrics = step(state, sharding.to_devices(local, mesh))
    losses.append(float(metrics.get("train/loss", metrics.get("train/loss_perturbed"))))
  whole = jax.jit(lambda tree: tree, out_shardings=sharding.replicated(mesh))(state.params)
  leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(whole))
  return {"losses": np.array(losses)} | {jax.tree_util.keystr(k): x for k, x in leaves}


def main(out: str, coordinator: str, process: str) -> None:
  settings = config.default().cluster
  settings.update(coordinator=coordinator, num_processes=2, process_id=int(process))
  with StopRequest() as stop, cluster.joined(settings, stop) as hosts:
    results = {f"{m}/{k}": v for m in METHODS for k, v in train(m).items()}
    if hosts.first:
      np.savez(out, **results)


if __name__ == "__main__":
  main(*sys.argv[1:])
