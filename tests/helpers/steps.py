"""Training steps of a tiny model on random batches, also with something wrong in them."""

import jax
import numpy as np

from helpers.batches import random_batch
from nanosam.model import sharding
from nanosam.run.step import TrainStep
from nanosam.run.validate import validate

VOCAB = 64


def make_step(c, devices=1):
  validate(c)
  mesh = sharding.make_mesh(1, -1, devices=jax.devices()[:devices])
  return TrainStep(c, VOCAB, mesh)


def batches(c, mesh, n, change=lambda i, b: b):
  for i in range(n):
    batch = change(i, random_batch(i, c.batch_size, c.model.L, VOCAB))
    yield sharding.to_devices(jax.tree.map(np.asarray, batch), mesh)


def steps(c, n=3, devices=1, change=lambda i, b: b, start=lambda state: state):
  train_step = make_step(c, devices)
  state, step = start(train_step.init(0)), train_step.trace().lower().compile()
  history = []
  for batch in batches(c, train_step.mesh, n, change):
    state, metrics = step(state, batch)
    history.append(jax.device_get(metrics))
  return jax.device_get(state), history


def bad_params(value):
  def change(state):
    params = jax.tree.map(lambda x: x, state.params)
    params["out_norm"]["scale"] = params["out_norm"]["scale"].at[0].set(value)
    return state.replace(params=params)

  return change


def bad_data(value):
  def change(i, batch):
    if i != 1:
      return batch
    return batch._replace(weights_BxL=batch.weights_BxL.at[3, 0].set(value))

  return change
