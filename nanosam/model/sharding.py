"""The mesh and its rules: the only module that knows about devices.

Two axes. Batches are split over both; parameters, gradients and optimizer state over `fsdp`. A
weight is gathered where it is used and its gradient is scattered as soon as it exists, so no device
ever holds more than its share of the state plus the weights of the layer at work.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanosam.system.errors import UsageError

DATA, FSDP = "data", "fsdp"
BATCH = P((DATA, FSDP))
TILE_ROWS = 128  # of a TPU, in any type of number
STACKED = "layers"  # parameters below this name carry a leading axis of layers


def make_mesh(data: int, fsdp: int, devices: list[jax.Device] | None = None) -> Mesh:
  if devices is None:  # each process's together, so that its rows of a batch are too
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
  shape = mesh_shape(data, fsdp, len(devices))
  return Mesh(np.asarray(devices).reshape(shape), (DATA, FSDP), axis_types=(AxisType.Auto,) * 2)


def mesh_shape(data: int, fsdp: int, n_devices: int) -> tuple[int, int]:
  """Resolves -1 ("the rest") and checks that the axes multiply out."""
  if (data == -1 and fsdp == -1) or min(data, fsdp) < -1 or 0 in (data, fsdp):
    raise UsageError(
      f"mesh.data={data}, mesh.fsdp={fsdp}: use positive sizes, with -1 at most once for the rest"
    )
  known = max(data, 1) * max(fsdp, 1)
  data, fsdp = (n_devices // known if axis == -1 else axis for axis in (data, fsdp))
  if data * fsdp != n_devices:
    raise UsageError(
      f"mesh of data={data} x fsdp={fsdp} does not cover {n_devices} device(s): make the product "
      f"{n_devices}, or set one axis to -1"
    )
  return data, fsdp


def shards(mesh: Any) -> int:
  """Into how many parts `mesh` splits a batch."""
  return math.prod(mesh.shape.values())


def parameter_spec(shape: tuple[int, ...], fsdp: int, stacked: bool = False) -> P:
  """Splits the largest axis that divides evenly; small or odd parameters stay whole."""
  first = 1 if stacked else 0  # a layer must be whole on every device to be scanned over
  axes = [i for i in range(first, len(shape)) if shape[i] % fsdp == 0 and shape[i] >= fsdp]
  if fsdp == 1 or len(shape) - first < 2 or not axes:
    return P()
  split = max(axes, key=lambda i: shape[i])
  return P(*(FSDP if i == split else None for i in range(len(shape))))


def _specs(tree: Any, mesh: Any) -> Any:
  def leaf(path, x):
    stacked = any(getattr(key, "key", None) == STACKED for key in path)
    return parameter_spec(x.shape, mesh.shape[FSDP], stacked)

  return jax.tree_util.tree_map_with_path(leaf, tree)


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """Shardings of parameters and of all that mirrors them: gradients, moments, perturbations."""
  return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), state, _specs(state, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def local_rows(mesh: Mesh, batch_size: int) -> range:
  """The rows of a global batch that this process must provide."""
  indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
  slices = [index[0] for index in indices.values() if index is not None]
  rows = sorted({i for s in slices for i in range(*s.indices(batch_size))})
  if rows != list(range(rows[0], rows[-1] + 1)):
    raise UsageError(
      "this mesh gives a process scattered rows of the batch; choose another mesh.data"
    )
  return range(rows[0], rows[-1] + 1)


def to_devices(batch: Any, mesh: Mesh) -> Any:
  """Global arrays from every process's own rows."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


# Inside jit, under `jax.set_mesh`. Without a mesh these do nothing.


def _constrain(x: jax.Array, spec: P) -> jax.Array:
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, spec)


def split_over_batch(x: jax.Array, axis: int = 0) -> jax.Array:
  return _constrain(x, P(*(None,) * axis, *BATCH))


def batch_shards() -> int:
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else shards(mesh)


def gathered(w: jax.Array, dtype: Any) -> jax.Array:
  """A parameter, whole and in the compute type, at its point of use.

  Cast first, so the smaller type travels. The inner constraint is for the way back: it makes the
  gradient arrive split, which turns an all-reduce into a reduce-scatter.
  """
  mesh = jax.sharding.get_abstract_mesh()
  w = w.astype(dtype)
  if mesh.empty:
    return w
  w = _constrain(w, parameter_spec(w.shape, mesh.shape[FSDP]))
  return _constrain(w, P())


class Split(NamedTuple):
  """How a matrix is split over FSDP."""

  axis: int
  padding: int  # rows to add before a sum over devices is scattered

  @property
  def spec(self) -> P:
    return P(*(None,) * self.axis, FSDP)


def split_of(shape: tuple[int, ...]) -> Split | None:
  """None if every device has all of it.

  TPUs reduce a matrix whole, and then take their columns of it, if its rows do not fill their
  tiles, as those of most vocabularies do not.
  """
  mesh = jax.sharding.get_abstract_mesh()
  spec = P() if mesh.empty else parameter_spec(shape, mesh.shape[FSDP])
  if FSDP not in spec:
    return None
  axis = spec.index(FSDP)
  return Split(axis, -shape[0] % TILE_ROWS if axis else 0)


def rows_of(w_VxD: jax.Array, ids_BxL: jax.Array, dtype: Any) -> jax.Array:
  """w[ids], for a parameter in the compute type and ids that are split as a batch is.

  Widened to `dtype` before the lookup: on the way back many tokens add up in one row. Each device
  adds up its own, and the sums are scattered.
  """
  split = split_of(w_VxD.shape)
  if split is None or ids_BxL.shape[0] % batch_shards():
    return gathered(w_VxD, w_VxD.dtype).astype(dtype)[ids_BxL]

  def look_up(part: jax.Array, ids: jax.Array) -> jax.Array:
    padded = jnp.pad(part, ((0, split.padding), (0, 0)))
    return jax.lax.all_gather(padded, FSDP, axis=split.axis, tiled=True).astype(dtype)[ids]

  return jax.shard_map(look_up, in_specs=(split.spec, BATCH), out_specs=BATCH)(w_VxD, ids_BxL)


def sum_of_shards(parts_GxVxD: jax.Array, split: Split) -> jax.Array:
  """The sum over the first axis, one part on each device, which arrives split."""

  def add(part_1xVxD: jax.Array) -> jax.Array:
    mine = jax.lax.psum_scatter(part_1xVxD[0], FSDP, scatter_dimension=split.axis, tiled=True)
    return jax.lax.psum(mine, DATA)

  return jax.shard_map(add, in_specs=BATCH, out_specs=split.spec)(parts_GxVxD)


def split_like_parameters(tree: Any) -> Any:
  """Constrains gradients and the like to the layout of the parameters they belong to."""
  mesh = jax.sharding.get_abstract_mesh()
  return tree if mesh.empty else jax.tree.map(_constrain, tree, _specs(tree, mesh))
