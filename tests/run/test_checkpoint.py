import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nanosam.model import sharding
from nanosam.run.checkpoint import Checkpoints, checksums
from nanosam.system.errors import UserError


def make_state(scale: float = 1.0):
  """Large enough that arrays and their index are files of their own."""
  w = scale * jax.random.normal(jax.random.key(0), (64, 128))
  return {
    "params": {"w": w, "b": w[0].astype(jnp.bfloat16)},
    "moments": (w**2, jnp.zeros((), jnp.int32)),
    "flag": jnp.array([True, False]),
  }


def abstract(state, devices: int = 1):
  mesh = sharding.make_mesh(1, -1, jax.devices()[:devices])

  def leaf(x):
    spec = PartitionSpec(sharding.FSDP) if x.ndim == 2 else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(leaf, state)


def save_two(workdir, **options) -> None:
  checkpoints = Checkpoints(workdir, **options)
  for step in (4, 8):
    checkpoints.save(step, make_state(step), {"step": step, "x": 0.1}, eval_loss=1.0 / step)
  checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("saved")
  save_two(workdir)
  return workdir


def assert_equal(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("devices", [1, 8])
def test_restores_what_was_saved_on_any_number_of_devices(saved, devices):
  target = abstract(make_state(), devices)
  found = Checkpoints(saved, read_only=True).restore(target, 4)
  assert found.run == {"step": 4, "x": 0.1}
  assert_equal(found.state, make_state(4))
  assert found.state["params"]["w"].sharding == target["params"]["w"].sharding


def test_restores_parameters_alone(saved):
  target = {"params": abstract(make_state())["params"]}
  found = Checkpoints(saved, read_only=True).restore_parts(target, 8)
  assert_equal(found["params"], make_state(8)["params"])


def test_keeps_the_newest_and_the_best(tmp_path):
  checkpoints = Checkpoints(tmp_path, max_to_keep=2)
  for step, loss in [(1, 3.0), (2, 1.0), (3, float("nan")), (4, None), (5, 2.0)]:
    checkpoints.save(step, make_state(step), {}, eval_loss=loss)
  checkpoints.wait()
  assert checkpoints.steps() == [2, 4, 5]
  checkpoints.close()


def files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)


def damage(file: pathlib.Path, how: str) -> None:
  content = bytearray(file.read_bytes())
  middle = len(content) // 2
  if how == "delete":
    file.unlink()
  elif how == "truncate":
    file.write_bytes(content[:middle])
  else:
    content[middle] ^= 0x15  # a digit of JSON becomes another character that is not a digit
    content[middle + 1 : middle + 2] = b"7"
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["delete", "truncate", "garble"])
def test_damage_never_goes_unnoticed(saved, tmp_path, how, capfd):
  """Whatever happens to whichever file: the same state, or the one before; never another."""
  fell_back = 0
  target = abstract(make_state())
  for number, file in enumerate(files(saved / "checkpoints" / "8")):
    workdir = shutil.copytree(saved, tmp_path / str(number))
    damage(workdir / file.relative_to(saved), how)
    checkpoints = Checkpoints(workdir, say=lambda text: None)
    found = checkpoints.restore_newest(target)
    assert found is not None
    assert found.run["step"] == found.step
    assert_equal(found.state, make_state(found.step))
    if found.step == 4:
      fell_back += 1
      assert checkpoints.steps() == [4]
      assert (workdir / "unreadable_checkpoints" / "8").is_dir()
    checkpoints.close()
  assert fell_back >= 4
  assert "Traceback" not in capfd.readouterr().err


def test_unreadable_checkpoints_of_the_same_step_do_not_replace_each_other(saved, tmp_path):
  workdir = shutil.copytree(saved, tmp_path / "run")
  for _ in range(2):
    damage(max(files(workdir / "checkpoints" / "8"), key=lambda p: p.stat().st_size), "garble")
    checkpoints = Checkpoints(workdir, say=lambda text: None)
    checkpoints.restore_newest(abstract(make_state()))
    checkpoints.save(8, make_state(8), {}, eval_loss=None)
    checkpoints.close()
  assert {p.name for p in (workdir / "unreadable_checkpoints").iterdir()} == {"8", "8.1"}


def test_none_can_be_read(saved, tmp_path):
  workdir = shutil.copytree(saved, tmp_path / "run")
  for step in ("4", "8"):
    damage(max(files(workdir / "checkpoints" / step), key=lambda p: p.stat().st_size), "truncate")
  with pytest.raises(UserError, match=r"none of the checkpoints \[4, 8\]"):
    Checkpoints(workdir, say=lambda text: None).restore_newest(abstract(make_state()))
  assert not (workdir / "unreadable_checkpoints").exists()


def test_a_model_of_another_shape_is_not_restored(saved, tmp_path):
  workdir = shutil.copytree(saved, tmp_path / "run")
  other = abstract(make_state())
  w = other["params"]["w"]
  other["params"]["w"] = jax.ShapeDtypeStruct((64, 64), w.dtype, sharding=w.sharding)
  with pytest.raises(UserError, match=r"to another model .*\(64, 64\) is not .*\(64, 128\)\)"):
    Checkpoints(workdir, say=lambda text: None).restore_newest(other)
  assert Checkpoints(workdir).steps() == [4, 8]


def test_reading_does_not_disturb_a_run_that_is_saving(saved, tmp_path):
  workdir = shutil.copytree(saved, tmp_path / "run")
  partial = workdir / "checkpoints" / "12.orbax-checkpoint-tmp"
  shutil.copytree(workdir / "checkpoints" / "8", partial)
  assert Checkpoints(workdir, read_only=True).steps() == [4, 8]
  assert partial.exists()
  checkpoints = Checkpoints(workdir)
  checkpoints.save(10, make_state(), {}, eval_loss=None)
  checkpoints.close()
  assert not partial.exists()  # it was left by a run that died


def test_a_folder_that_cannot_be_used(tmp_path):
  (tmp_path / "checkpoints").write_text("")
  with pytest.raises(UserError, match="cannot use the checkpoint folder"):
    Checkpoints(tmp_path)


def test_checksums_see_every_change_but_not_the_devices():
  state = make_state()
  reference = checksums(state)
  assert set(reference) == {"params/w", "params/b", "moments/0", "moments/1", "flag"}
  split = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract(state, 8)))
  assert checksums(split) == reference
  w = np.array(state["params"]["w"])
  flipped, swapped, negated = w.copy(), w.copy(), w.copy()
  flipped.view(np.uint32)[63, 127] ^= 1 << 31
  swapped[[3, 9]] = w[[9, 3]]
  negated[0, 0] = np.nextafter(w[0, 0], 9)
  for other in (flipped, swapped, negated):
    assert checksums({"w": jnp.asarray(other)})["w"] != reference["params/w"]
  assert checksums({"w": jnp.zeros(3)}) != checksums({"w": -jnp.zeros(3)})
