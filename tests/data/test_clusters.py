"""Hard and easy documents, against brute force."""

import numpy as np
import pytest

from nanosam.data import clusters
from nanosam.data.clusters import Matrix, choose, describe, features, median, two_means
from nanosam.system.errors import UserError


def matrix(x):
  return Matrix(len(x), lambda rows: x[rows])


@pytest.fixture(params=[7, 1 << 16], autouse=True)
def block(request, monkeypatch):
  monkeypatch.setattr(clusters, "_BLOCK", request.param)


def inertia(x, high):
  parts = (x[high], x[~high])
  return sum(np.sum((part - part.mean(0)) ** 2) for part in parts if len(part))


@pytest.mark.parametrize("seed", range(8))
def test_two_means_on_a_line_is_the_best_split(seed):
  rng = np.random.default_rng(seed)
  x = np.concatenate([rng.normal(3.0, 0.3, 40), rng.normal(4.5, 0.4, 20 + seed)])[:, None]
  rng.shuffle(x)
  splits = [x[:, 0] > limit for limit in np.sort(x[:, 0])[:-1]]
  best = min(splits, key=lambda high: inertia(x, high))
  found = two_means(matrix(x))
  np.testing.assert_array_equal(found.hard_D, best)
  np.testing.assert_allclose(found.centroids, [x[~best].mean(0), x[best].mean(0)])


def test_two_means_of_trajectories_cannot_be_improved_by_moving_one(tmp_path):
  x = np.random.default_rng(0).normal(size=(41, 3)).cumsum(1)
  found = two_means(matrix(x))
  lowest = inertia(x, found.hard_D)
  for i in range(len(x)):
    moved = found.hard_D.copy()
    moved[i] ^= True
    assert inertia(x, moved) > lowest
  assert x[found.hard_D].mean() > x[~found.hard_D].mean()
  for k, name in enumerate(("easy", "hard")):
    mine = found.hard_D == bool(k)
    d = describe(matrix(x), matrix(x), found, 4)[name]
    assert d.documents == mine.sum()
    np.testing.assert_allclose(d.mean_K, x[mine].mean(0))
    np.testing.assert_allclose(d.deviation_K, x[mine].std(0))
    away = np.sum((x - x[mine].mean(0)) ** 2, 1)
    assert d.typical == [i for i in np.argsort(away) if mine[i]][:4]


@pytest.mark.parametrize("D", [9, 10, 33])
def test_the_median_halves(D):
  x = np.random.default_rng(D).normal(size=(D, 2))
  assert (x.mean(1) > median(matrix(x))).sum() == D // 2


def test_features():
  loss, untrained = np.array([[4.0, 2.0], [3.0, 3.0]]), np.array([8.0, 3.0])

  def of(name):
    return np.concatenate([x for _, x in features(matrix(loss), name, untrained).blocks()])

  np.testing.assert_array_equal(of("trajectory"), loss)
  np.testing.assert_array_equal(of("last"), loss[:, 1:])
  np.testing.assert_allclose(of("relative"), np.log(loss / untrained[:, None]))


def test_losses_that_are_alike_are_no_clusters():
  with pytest.raises(UserError, match="all documents are in one cluster"):
    two_means(matrix(np.full((30, 2), 3.5)))


def test_losses_that_are_not_finite_are_named():
  x = np.ones((30, 2))
  x[20, 1] = np.nan
  with pytest.raises(UserError, match="not finite"):
    two_means(matrix(x))


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_as_many_are_chosen_of_every_kind(share):
  hard = np.random.default_rng(1).random(200) < share
  number = min(hard.sum(), 200 - hard.sum())
  found = {what: choose(hard, what, seed=3) for what in clusters.CHOICES}
  assert {int(x.sum()) for x in found.values()} == {number}
  assert not (found["hard"] & ~hard).any() and not (found["easy"] & hard).any()
  both = (found["random"] & hard).sum(), (found["random"] & ~hard).sum()
  assert min(both) > 5  # of either kind
  np.testing.assert_array_equal(choose(hard, "random", 3), found["random"])
  assert (choose(hard, "random", 4) != found["random"]).any()
  if share < 0.5:
    np.testing.assert_array_equal(found["hard"], hard)
