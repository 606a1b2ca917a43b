import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.batches import random_batch
from jax.sharding import PartitionSpec as P

from nanosam.model import sharding
from nanosam.run.step import TrainStep
from nanosam.system.errors import UsageError

VOCAB = 96


def train(c, mesh_shape, steps=3, n_devices=8):
  """Losses of a few steps, and the final state, on a mesh of the first devices."""
  mesh = sharding.make_mesh(*mesh_shape, devices=jax.devices()[:n_devices])
  train_step = TrainStep(c, VOCAB, mesh)
  state, step, losses = train_step.init(c.seed), train_step.trace().lower().compile(), []
  for i in range(steps):
    batch = sharding.to_devices(
      jax.tree.map(np.asarray, random_batch(i, c.batch_size, c.model.L, VOCAB)), mesh
    )
    state, metrics = step(state, batch)
    losses.append(float(metrics["train/loss"]))
  return losses, state


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)])
def test_every_mesh_gives_the_losses_of_one_device(tiny_config, shape):
  one, state = train(tiny_config, (1, 1), n_devices=1)
  losses, sharded = train(tiny_config, shape)
  np.testing.assert_allclose(losses, one, rtol=2e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5),
    state.params,
    sharded.params,
  )


def test_accumulation_and_scan_on_a_mesh(tiny_config):
  tiny_config.batch_size = 16
  one, _ = train(tiny_config, (1, 1), n_devices=1)
  tiny_config.grad_accumulation_steps = 2
  np.testing.assert_allclose(train(tiny_config, (2, 4))[0], one, rtol=2e-6)
  tiny_config.model.update(scan_layers=True, remat=True)
  scanned, _ = train(tiny_config, (1, 1), n_devices=1)
  np.testing.assert_allclose(train(tiny_config, (2, 4))[0], scanned, rtol=2e-6)


def test_state_is_split_over_fsdp(tiny_config):
  _, state = train(tiny_config, (2, 4), steps=1)
  kernel = state.params["layer_0"]["mlp"]["up"]["kernel"]
  moment = jax.tree.leaves(state.opt_state)
  assert kernel.sharding.spec == P(None, "fsdp")
  assert kernel.addressable_shards[0].data.size == kernel.size // 4
  shares = [x.addressable_shards[0].data.size / x.size for x in moment if x.ndim == 2]
  assert shares and set(shares) == {0.25}


def test_unequal_microbatches_equal_the_full_batch(tiny_config):
  whole, a = train(tiny_config, (1, 1), n_devices=1)
  tiny_config.grad_accumulation_steps = 4
  parts, b = train(tiny_config, (1, 1), n_devices=1)
  np.testing.assert_allclose(parts, whole, rtol=2e-6)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), a.params, b.params)


def test_mesh_shapes():
  assert sharding.mesh_shape(-1, 2, 8) == (4, 2)
  assert sharding.mesh_shape(1, -1, 8) == (1, 8)
  for data, fsdp in ((3, -1), (2, 2), (-1, -1), (0, 8), (16, -1)):
    with pytest.raises(UsageError):
      sharding.mesh_shape(data, fsdp, 8)


def test_parameter_spec():
  assert sharding.parameter_spec((10, 64), 4) == P(None, "fsdp")
  assert sharding.parameter_spec((64, 10), 4) == P("fsdp", None)
  assert sharding.parameter_spec((64,), 4) == P()  # small vectors stay whole
  assert sharding.parameter_spec((7, 9), 4) == P()
  assert sharding.parameter_spec((8, 16, 6), 4, stacked=True) == P(None, "fsdp", None)


def test_a_process_provides_the_rows_of_its_devices():
  mesh = sharding.make_mesh(2, 4)
  assert sharding.local_rows(mesh, 16) == range(16)
  rows = np.arange(16)
  np.testing.assert_array_equal(jnp.asarray(sharding.to_devices(rows, mesh)), rows)
