"""Which sequences to show twice: those that a proxy found hard, and the controls."""

import numpy as np

from nanosam.data.clusters import Matrix, features, two_means

FEATURES = ("relative", "last", "trajectory")
CHECKPOINTS = 5


def checkpoints(steps: int) -> list[int]:
  """Steps of the proxy at which losses are taken."""
  return [steps * (i + 1) // CHECKPOINTS for i in range(CHECKPOINTS)]


def hard(loss_PxK: np.ndarray, untrained_P: np.ndarray, feature: str) -> np.ndarray:
  """The harder of two clusters, by losses at K checkpoints.

  `trajectory` is the paper's: the losses as they are, which mostly tells large targets from small
  ones. `last` has the last checkpoint alone. `relative` divides by the loss of an untrained model:
  what is hard is what has not come down.
  """
  loss = Matrix(len(loss_PxK), lambda rows: loss_PxK[rows])
  return two_means(features(loss, feature, untrained_P)).hard_D


def controls(hard_P: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """As many of the others, and of all."""
  easy_P = np.zeros_like(hard_P)
  others = np.flatnonzero(~hard_P)
  easy_P[rng.choice(others, min(hard_P.sum(), len(others)), replace=False)] = True
  return {"easy": easy_P, "random": rng.permutation(hard_P)}
