"""Hard and easy documents: two clusters of their losses at some checkpoints of a proxy.

Losses stay on disk, [documents] for each checkpoint, and are read in blocks: a store may have more
documents than fit in memory as floats. One byte a document is held.

D documents, K checkpoints
"""

import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nanosam.data.packing import shuffled
from nanosam.system.errors import UserError

FEATURES = ("trajectory", "last", "relative")
CHOICES = ("hard", "easy", "random")
_BLOCK = 1 << 16  # documents
_HALVINGS = 60  # of an interval, to find a median to the last digit
_ROUNDS = 1000  # of Lloyd's algorithm, which ends by itself unless rounding makes it go in circles


class Matrix:
  """[D, K] numbers, a block of rows at a time."""

  def __init__(self, rows: int, read: Callable[[slice], np.ndarray]):
    self.rows, self._read = rows, read

  def __len__(self) -> int:
    return self.rows

  def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
    for start in range(0, self.rows, _BLOCK):
      block = slice(start, min(start + _BLOCK, self.rows))
      yield block, self._read(block)


def losses(columns: Sequence[pathlib.Path]) -> Matrix:
  """Files of losses by document, side by side."""
  found = [np.load(path, mmap_mode="r") for path in columns]
  return Matrix(len(found[0]), lambda rows: np.stack([x[rows] for x in found], axis=1))


def features(loss_DxK: Matrix, feature: str, untrained_D: np.ndarray | None = None) -> Matrix:
  """What is clustered.

  trajectory   the losses as they are
  last         that of the last checkpoint
  relative     the log of each over the loss of an untrained model: hard is what has not come down
  """

  def read(rows: slice) -> np.ndarray:
    x_BxK = loss_DxK._read(rows)
    if feature == "last":
      return x_BxK[:, -1:]
    if feature == "relative":
      assert untrained_D is not None
      return relative(x_BxK, untrained_D[rows])
    return x_BxK

  return Matrix(len(loss_DxK), read)


def relative(loss_BxK: np.ndarray, untrained_B: np.ndarray) -> np.ndarray:
  tiny = np.finfo(np.float32).tiny
  return np.log(loss_BxK + tiny) - np.log(untrained_B + tiny)[:, None]


class Clusters(NamedTuple):
  hard_D: np.ndarray  # bool
  centroids: np.ndarray  # [2, K]: easy, hard


def two_means(x_DxK: Matrix) -> Clusters:
  """Lloyd's algorithm from the median split; the cluster of the higher mean is the hard one."""
  high_D = np.zeros(len(x_DxK), bool)
  middle = median(x_DxK)
  for rows, x in x_DxK.blocks():
    high_D[rows] = x.mean(1) > middle
  for _ in range(_ROUNDS):
    centroids, changed = means(x_DxK, high_D), False
    for rows, x in x_DxK.blocks():
      nearer = nearest(x, centroids)
      changed |= bool((nearer != high_D[rows]).any())
      high_D[rows] = nearer
    if not changed:
      break
  if centroids[1].mean() > centroids[0].mean():
    return Clusters(high_D, centroids)
  return Clusters(~high_D, centroids[::-1])


def nearest(x_BxK: np.ndarray, centroids: np.ndarray) -> np.ndarray:
  """Whether the second centroid is nearer than the first."""
  first, second = (np.sum((x_BxK - c) ** 2, axis=1) for c in centroids)
  return second < first


def means(x_DxK: Matrix, high_D: np.ndarray) -> np.ndarray:
  """Of the documents that are not high, and of those that are."""
  sums, counts = [0.0, 0.0], [0, 0]
  for rows, x in x_DxK.blocks():
    for k, mine in enumerate((~high_D[rows], high_D[rows])):
      sums[k] = sums[k] + x[mine].sum(0)
      counts[k] += int(mine.sum())
  if not all(counts):
    raise UserError(
      "all documents are in one cluster, their losses are alike: nothing tells hard ones from "
      "easy ones; use other checkpoints (--steps) or another --feature"
    )
  return np.stack([s / n for s, n in zip(sums, counts, strict=True)])


def median(x_DxK: Matrix) -> float:
  """A value that half of the documents, by their mean, do not exceed; without sorting them."""
  low, high = math.inf, -math.inf
  for _, x in x_DxK.blocks():
    if not np.isfinite(x).all():
      raise UserError(
        "some losses of the proxy are not finite: choose checkpoints from before it diverged "
        "(--steps), or train it again"
      )
    low, high = min(low, x.mean(1).min()), max(high, x.mean(1).max())
  for _ in range(_HALVINGS):
    middle = (low + high) / 2
    below = sum(int((x.mean(1) <= middle).sum()) for _, x in x_DxK.blocks())
    low, high = (low, middle) if 2 * below >= len(x_DxK) else (middle, high)
  return high


def choose(hard_D: np.ndarray, what: str, seed: int) -> np.ndarray:
  """The documents to repeat, as many for every `what`: all hard ones, if these are the fewer."""
  number = min(int(hard_D.sum()), int((~hard_D).sum()))
  among_D = {"hard": hard_D, "easy": ~hard_D, "random": np.ones_like(hard_D)}[what]
  count = int(among_D.sum())
  if number == count:
    return among_D
  chosen_D = among_D.copy()
  for rank, document in enumerate(np.flatnonzero(among_D)):
    chosen_D[document] = shuffled(rank, count, seed) < number
  return chosen_D


class Described(NamedTuple):
  """One cluster."""

  documents: int
  mean_K: np.ndarray  # loss by checkpoint
  deviation_K: np.ndarray
  typical: list[int]  # documents nearest to the centroid, the nearest first
  typical_losses: list[list[float]]


def describe(
  loss_DxK: Matrix, x_DxK: Matrix, clusters: Clusters, examples: int = 5
) -> dict[str, Described]:
  found = {}
  for k, name in enumerate(("easy", "hard")):
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    near: list[tuple[float, int, list[float]]] = []
    for (rows, loss), (_, x) in zip(loss_DxK.blocks(), x_DxK.blocks(), strict=True):
      mine = np.flatnonzero(clusters.hard_D[rows] == bool(k))
      count += len(mine)
      total, squares = total + loss[mine].sum(0), squares + (loss[mine] ** 2).sum(0)
      away = np.sum((x[mine] - clusters.centroids[k]) ** 2, axis=1)
      for i in np.argsort(away, kind="stable")[:examples]:
        near.append((float(away[i]), rows.start + int(mine[i]), loss[mine[i]].tolist()))
      near = sorted(near)[:examples]
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    found[name] = Described(count, mean, deviation, [d for _, d, _ in near], [y for *_, y in near])
  return found
