"""The vision Transformer, and the methods on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.batches import random_images
from helpers.toy import close, run

from nanosam.curvature import products
from nanosam.model import sharding
from nanosam.model.classifier import Classifier
from nanosam.model.transformer import ModelConfig
from nanosam.model.vision import POOLINGS, VisionTransformer, patches
from nanosam.optim import methods
from nanosam.optim.direction import Moments
from nanosam.optim.objective import Dense
from nanosam.optim.passes import Passes
from nanosam.run import flops
from nanosam.run.step import TrainStep
from nanosam.run.validate import validate

B, S, V = 6, 8, 5


def network(pooling="mean", dtype=jnp.float32, head_scale=1.0):
  return VisionTransformer(
    ModelConfig(
      **{"D": 8, "H": 2, "L": 1, "N": 1, "F": 12, "V": V, "activation": "gelu", "tied": False},
      **{"dtype": dtype, "remat": False, "scan_layers": False, "attention": "plain"},
      **{"kind": "vit", "image_size": S, "patch_size": 4, "pooling": pooling},
      head_scale=head_scale,
    )
  )


def init(net):
  return net.init(jax.random.key(0), random_images(0, 1, S, V).inputs)["params"]


@pytest.fixture
def vit_config(tiny_config):
  tiny_config.model.update(kind="vit", L=1, image_size=S, patch_size=4)
  validate(tiny_config)
  return tiny_config


def test_patches_are_squares_row_by_row():
  images = random_images(0, 2, S, V).inputs
  found = patches(images, 4)
  assert found.shape == (2, 4, 48)
  square = np.asarray(images)[1, 4:, :4].astype(np.float32).ravel()  # below the first
  np.testing.assert_allclose(found[1, 2], square / 127.5 - 1, atol=1e-6)
  assert found.min() >= -1 and found.max() <= 1


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_hidden_state_that_sees_the_whole_image(pooling):
  net, images = network(pooling), random_images(0, 2, S, V).inputs
  params = init(net)
  assert params["pos_embed"].shape == (4 + (pooling == "token"), 8)
  assert params["unembed"].shape == (V, 8)
  apply = jax.jit(lambda x: net.apply({"params": params}, x))
  before = apply(images)
  assert before.shape == (2, 1, 8)
  for corner in ((0, 0), (0, S - 1), (S - 1, 0), (S - 1, S - 1)):
    after = apply(images.at[0, *corner].set(255 - images[0, *corner]))
    assert (before[0] != after[0]).all()
    np.testing.assert_array_equal(before[1], after[1])


def test_the_head_may_start_at_zero():
  whole, half, zero = (init(network(head_scale=scale))["unembed"] for scale in (1.0, 0.5, 0.0))
  np.testing.assert_array_equal(whole, 2 * half)
  assert jnp.std(whole) == pytest.approx(8**-0.5, rel=0.3) and not zero.any()


@functools.partial(jax.jit, static_argnums=0)
def setting(net):
  params = jax.tree.map(lambda x: x.astype(net.cfg.dtype), init(net))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), 2 * len(leaves))
  noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves + leaves, strict=True)]
  mu, nu = (
    jax.tree.unflatten(tree, noise[: len(leaves)]),
    jax.tree.unflatten(tree, [0.01 * x**2 for x in noise[len(leaves) :]]),
  )
  return params, random_images(0, B, S, V), Moments(mu, nu, 7, updates=0)


def objectives(net):
  """The chunked head, and all logits at once."""

  def hidden(params, batch):
    return net.apply({"params": params}, batch.inputs)

  def logits(params, batch):
    return jnp.einsum("bd,vd->bv", hidden(params, batch)[:, 0], params["unembed"])

  def loss(logits_BxV, batch):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits_BxV, batch.targets_BxL[:, 0])
    return jnp.sum(nll * batch.weights_BxL[:, 0]) / jnp.sum(batch.weights_BxL)

  chunked = Classifier(hidden, hidden, chunk=4, residual="auto", one_label=True)
  return chunked, Dense(logits, loss, weight=lambda batch: jnp.sum(batch.weights_BxL))


FAST = ("sam", "precond_func_sam")


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in methods.METHODS],
)
def test_every_method_is_that_of_the_dense_model(x64, name):
  net = network("token", jnp.float64)
  params, batch, moments = setting(net)
  ours, plain = (
    run(name, params, batch, moments, 0.3, model=model, micro=2) for model in objectives(net)
  )
  close(ours.gradient, plain.gradient)
  close(ours.metrics, plain.metrics)


def test_what_is_right_is_the_class_with_the_largest_logit():
  net = network()
  params, batch, _ = setting(net)
  model, dense = objectives(net)
  best_B = jnp.argmax(dense.outputs(params, batch), -1)
  batch = batch._replace(targets_BxL=batch.targets_BxL.at[::2].set(best_B[::2, None]))
  found = model.correct(params, batch)
  np.testing.assert_array_equal(found, batch.targets_BxL == best_B[:, None])
  assert found[::2].all() and not found.all()


def test_taus_are_those_of_the_dense_model(x64):
  net = network("mean", jnp.float64)
  params, batch, moments = setting(net)
  found = [
    jax.jit(lambda p, b, d, m=model: products.taus(Passes(m, p, b), d))(params, batch, moments.mu)
    for model in objectives(net)
  ]
  close(*found)
  close(sum(found[0]), 1.0)


def train(c, mesh_shape, n_devices=8, steps=3):
  mesh = sharding.make_mesh(*mesh_shape, devices=jax.devices()[:n_devices])
  train_step = TrainStep(c, V, mesh)
  state, step, losses = train_step.init(c.seed), train_step.trace().lower().compile(), []
  for i in range(steps):
    batch = jax.tree.map(np.asarray, random_images(i, c.batch_size, S, V))
    state, metrics = step(state, sharding.to_devices(batch, mesh))
    losses.append(float(metrics["train/loss"]))
  return losses, state


def test_eight_devices_give_the_losses_of_one(vit_config):
  vit_config.opt.method = "func_sam"
  one, state = train(vit_config, (1, 1), n_devices=1)
  losses, sharded = train(vit_config, (2, 4))
  np.testing.assert_allclose(losses, one, rtol=2e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5),
    state.params,
    sharded.params,
  )


def test_a_second_pass_doubles_the_flops(vit_config):
  vit_config.model.update(D=64, H=4, N=3, image_size=32)
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])

  def cost(method):
    vit_config.opt.method = method
    return flops.count(TrainStep(vit_config, 10, mesh).trace().jaxpr)

  for method in ("sam", "func_sam"):
    assert cost(method) / cost("adamw") == pytest.approx(2, abs=0.005)
