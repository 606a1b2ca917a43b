"""Which sequences to show twice: those that a proxy found hard, and the controls."""

import numpy as np

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
  if feature == "trajectory":
    return two_means(loss_PxK)
  if feature == "last":
    return two_means(loss_PxK[:, -1:])
  tiny = np.finfo(np.float32).tiny
  return two_means(np.log(loss_PxK + tiny) - np.log(untrained_P + tiny)[:, None])


def two_means(x_PxK: np.ndarray) -> np.ndarray:
  """True for the cluster of the higher mean; Lloyd's algorithm from the median split."""
  mean_P = x_PxK.mean(1)
  high_P = mean_P > np.median(mean_P)
  while high_P.any() and not high_P.all():
    centre, other = x_PxK[high_P].mean(0), x_PxK[~high_P].mean(0)
    nearer_P = np.sum((x_PxK - centre) ** 2, 1) < np.sum((x_PxK - other) ** 2, 1)
    if (nearer_P == high_P).all():
      break
    high_P = nearer_P
  return high_P if mean_P[high_P].mean() > mean_P[~high_P].mean() else ~high_P


def controls(hard_P: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """As many of the others, and of all."""
  easy_P = np.zeros_like(hard_P)
  others = np.flatnonzero(~hard_P)
  easy_P[rng.choice(others, min(hard_P.sum(), len(others)), replace=False)] = True
  return {"easy": easy_P, "random": rng.permutation(hard_P)}
