import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.batches import random_batch
from jax.sharding import PartitionSpec as P

from nanosam.model import sharding
from nanosam.run.step import TrainStep
from nanosam.system.errors import UsageError

ROWS, COLUMNS = 96, 97  # vocabularies: how eight devices split the embedding


def train(c, mesh_shape, steps=3, n_devices=8, vocab=ROWS):
  """Losses of a few steps, and the final state, on a mesh of the first devices."""
  mesh = sharding.make_mesh(*mesh_shape, devices=jax.devices()[:n_devices])
  train_step = TrainStep(c, vocab, mesh)
  state, step, losses = train_step.init(c.seed), train_step.trace().lower().compile(), []
  for i in range(steps):
    batch = sharding.to_devices(
      jax.tree.map(np.asarray, random_batch(i, c.batch_size, c.model.L, vocab)), mesh
    )
    state, metrics = step(state, batch)
    losses.append(float(metrics["train/loss"]))
  return losses, state


@pytest.mark.parametrize(
  "shape, vocab",
  [((8, 1), ROWS), ((1, 8), ROWS), ((2, 4), ROWS), ((1, 8), COLUMNS), ((2, 4), COLUMNS)],
)
def test_every_mesh_gives_the_losses_of_one_device(tiny_config, shape, vocab):
  one, state = train(tiny_config, (1, 1), n_devices=1, vocab=vocab)
  losses, sharded = train(tiny_config, shape, vocab=vocab)
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


@pytest.mark.parametrize("vocab", [ROWS, COLUMNS])
def test_gradients_of_rows_and_of_partial_sums_arrive_split(vocab):
  mesh, D = sharding.make_mesh(2, 4), 16
  w_VxD = jax.random.normal(jax.random.key(0), (vocab, D))
  ids_BxL = jax.random.randint(jax.random.key(1), (8, 5), 0, vocab)
  by_row = jax.random.normal(jax.random.key(2), (8, 5, D))
  parts_GxVxD = jax.random.normal(jax.random.key(3), (8, vocab, D))
  expected = jnp.zeros_like(w_VxD).at[ids_BxL].add(by_row)
  with jax.set_mesh(mesh):
    spec = sharding.split_of(w_VxD.shape).spec
    assert spec == (P("fsdp") if vocab == ROWS else P(None, "fsdp"))

    def both(w, ids, ct, parts):
      x, back = jax.vjp(lambda w: sharding.rows_of(w, ids, jnp.float32), w)
      return x, back(ct)[0], sharding.sum_of_shards(parts, sharding.split_of(w.shape))

    x, dw_VxD, total_VxD = jax.jit(both)(
      jax.device_put(w_VxD, spec),
      *(jax.device_put(x, sharding.BATCH) for x in (ids_BxL, by_row, parts_GxVxD)),
    )
  np.testing.assert_array_equal(x, w_VxD[ids_BxL])
  np.testing.assert_allclose(dw_VxD, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(total_VxD, parts_GxVxD.sum(0), rtol=1e-5, atol=1e-5)
  for found in (dw_VxD, total_VxD):
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
