"""Noise and rounding of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanosam.curvature import changes
from nanosam.model import sharding
from nanosam.optim.base import matching

KEY = jax.random.key(3)


@pytest.fixture
def params():
  key = jax.random.split(jax.random.key(0), 4)
  size_Nx1x1 = jnp.array([0.1, 3.0])[:, None, None]
  return {
    "embed": jax.random.normal(key[0], (64, 40)),
    "layer_0": {"up": {"kernel": 0.02 * jax.random.normal(key[1], (40, 96))}},
    "layers": {"up": {"kernel": size_Nx1x1 * jax.random.normal(key[2], (2, 40, 96))}},
    "norm": {"scale": jax.random.normal(key[3], (40,))},
  }


def chosen(params, pattern="kernel|embed"):
  return matching(params, pattern)


def rms(x, axis=None):
  return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, axis))


@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_noise_is_relative_to_the_rms_of_each_matrix(params, scale):
  noisy = changes.noise(chosen(params), scale)(params, KEY)
  added = jax.tree.map(lambda a, b: a - b, noisy, params)
  for of in (lambda p: p["embed"], lambda p: p["layer_0"]["up"]["kernel"]):
    assert rms(of(added)) / rms(of(params)) == pytest.approx(scale, rel=0.05)
  stacked, before = added["layers"]["up"]["kernel"], params["layers"]["up"]["kernel"]
  np.testing.assert_allclose(rms(stacked, (1, 2)) / rms(before, (1, 2)), scale, rtol=0.05)
  np.testing.assert_array_equal(noisy["norm"]["scale"], params["norm"]["scale"])
  z = np.ravel(added["embed"] / (scale * rms(params["embed"])))
  assert abs(z.mean()) < 0.1 and np.mean(np.abs(z) < 1) == pytest.approx(0.683, abs=0.03)


def test_one_key_is_one_direction(params):
  """Of every size; another key is another one, and so is another matrix."""
  small, large = (changes.noise(chosen(params), s)(params, KEY)["embed"] for s in (0.1, 0.4))
  before = params["embed"]
  np.testing.assert_allclose(4 * (small - before), large - before, atol=1e-5)
  other = changes.noise(chosen(params), 0.1)(params, jax.random.key(4))["embed"]
  assert np.abs(np.corrcoef(np.ravel(other - before), np.ravel(small - before))[0, 1]) < 0.1
  noisy = changes.noise(chosen(params), 1.0)(params, KEY)["layers"]["up"]["kernel"]
  a, b = np.asarray(noisy - params["layers"]["up"]["kernel"]).reshape(2, -1)
  assert np.abs(np.corrcoef(a, b)[0, 1]) < 0.1


def rounded_by_hand(x, bits, group):
  """Of one channel."""
  found = []
  for start in range(0, len(x), group or len(x)):
    part = x[start : start + (group or len(x))]
    step = np.float32(np.abs(part).max() / np.float32(2 ** (bits - 1) - 1))
    found.append(np.round(part / step) * step)
  return np.concatenate(found)


@pytest.mark.parametrize("group", [0, 32, 40])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_by_hand(params, bits, group):
  """Columns of a matrix and rows of an embedding; the last group of 32 has but 8 of 40 inputs."""
  found = jax.device_get(changes.rounding(chosen(params), bits, group)(params, KEY))
  params = jax.device_get(params)
  by_hand = [rounded_by_hand(row, bits, group) for row in params["embed"]]
  np.testing.assert_allclose(found["embed"], by_hand, rtol=1e-6)
  for of in (lambda p: p["layer_0"]["up"]["kernel"], lambda p: p["layers"]["up"]["kernel"][1]):
    by_hand = [rounded_by_hand(column, bits, group) for column in of(params).T]
    np.testing.assert_allclose(of(found).T, by_hand, rtol=1e-6)
  assert len(np.unique(np.abs(found["embed"][0, : group or 40]))) <= 2 ** (bits - 1)
  np.testing.assert_array_equal(found["norm"]["scale"], params["norm"]["scale"])


def test_weights_on_the_grid_stay(params):
  """Channels of different sizes, each with its largest level in use; one of zeros."""
  rng = np.random.default_rng(0)
  level_IxO = rng.integers(-7, 8, (40, 6)).astype(np.float32)
  level_IxO[0] = 7
  kernel = level_IxO * 2.0 ** np.arange(-3, 3, dtype=np.float32)
  kernel[:, 2] = 0
  tree = {"kernel": jnp.asarray(kernel)}
  change = changes.rounding({"kernel": True}, 4)
  np.testing.assert_array_equal(change(tree, KEY)["kernel"], kernel)
  assert np.any(changes.rounding({"kernel": True}, 3)(tree, KEY)["kernel"] != kernel)


def test_only_what_the_regex_names(params):
  found = changes.rounding(chosen(params, "kernel"), 3)(params, KEY)
  np.testing.assert_array_equal(found["embed"], params["embed"])
  assert np.any(found["layer_0"]["up"]["kernel"] != params["layer_0"]["up"]["kernel"])


@pytest.mark.parametrize("kind", ["noise", "channel", "group"])
def test_a_mesh_gives_the_same_and_keeps_the_layout(params, kind):
  change = {
    "noise": changes.noise(chosen(params), 0.3),
    "channel": changes.rounding(chosen(params), 4),
    "group": changes.rounding(chosen(params), 4, 32),
  }[kind]
  split = jax.device_put(params, sharding.state_shardings(params, sharding.make_mesh(1, 8)))
  one, other = (change(p, KEY) for p in (params, split))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), one, other)
  jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail("moved"), other, split)
