"""The experiment on simplicity bias: its metric, training, arms, numbers and page."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from helpers.scripts import load_script

from nanosam.model import linear_attention as model
from nanosam.paper.simplicity import experiment, page, summary, theory, training
from nanosam.paper.simplicity import upsampling as up
from nanosam.paper.simplicity.experiment import ARMS, TASK, Arm, Result, Settings
from nanosam.system.errors import UsageError

L_D, A_D = TASK.eigenvalues_D, TASK.second_D
D = len(L_D)


# ---- The metric ----------------------------------------------------------------------------------


def test_entropy_of_durations():
  even = [[10, 20, 30, 40], [40, 10, 30, 20]]  # whatever the order
  at_once = [[7, 7, 7, 7]]
  halves = [[5, 5, 10, 10]]
  missing = [[1, 2, 3, np.nan]]
  found = training.entropy(np.array([*even, *at_once, *halves, *missing], float))
  np.testing.assert_allclose(found[:4], [np.log(4), np.log(4), 0, np.log(2)], atol=1e-12)
  assert np.isnan(found[4])
  times = np.array([[230.0, 360, 600, 2050]])
  shares = np.array([230, 130, 240, 1450]) / 2050
  np.testing.assert_allclose(training.entropy(times), -np.sum(shares * np.log(shares)))


# ---- Training ------------------------------------------------------------------------------------


def gradient_by_hand(p, moments, eps=None):
  """Eq. 19 to 21 of the paper, in NumPy, for moments of the whole population."""
  v, k, q = ({n: p[n] + (eps[n] if eps else 0) for n in p}[n] for n in "vkq")
  A = np.einsum("h,hi,hj->ij", v, k, q)
  inner = np.diag(L_D**2) - np.diag(A_D) @ A @ np.diag(L_D)
  return {
    "v": -2 * np.einsum("hi,ij,hj->h", k, inner, q),
    "k": -2 * v[:, None] * (q @ inner.T),
    "q": -2 * v[:, None] * (k @ inner),
  }


def by_hand(method, params, step_size, steps, rho):
  """Learning times and A, step by step."""
  p = {n: np.array(x) for n, x in params.items()}
  A_T, times_D = [np.einsum("h,hi,hj->ij", p["v"], p["k"], p["q"])], np.full(D, np.nan)
  for t in range(1, steps + 1):
    g = gradient_by_hand(p, TASK.moments)
    if method != "gd":
      square_H = g["v"] ** 2 + (g["k"] ** 2).sum(1) + (g["q"] ** 2).sum(1)
      norm_H = np.sqrt(
        square_H if method == "per head" else square_H.sum() * np.ones(len(square_H))
      )
      eps = {n: rho * (x.T / norm_H).T for n, x in g.items()}
      g = gradient_by_hand(p, TASK.moments, eps)
    p = {n: p[n] - step_size * g[n] for n in p}
    A_T.append(np.einsum("h,hi,hj->ij", p["v"], p["k"], p["q"]))
    times_D = np.where(np.isnan(times_D) & (np.diag(A_T[-1]) >= L_D / A_D / 2), t, times_D)
  return times_D, np.stack(A_T)


@pytest.mark.parametrize("method", ["gd", "sam", "per head"])
def test_training_against_a_loop_in_numpy(method, x64):
  rho, steps = 0.03, 300
  gradient = {
    "gd": lambda: training.gradient("sam", 0.0),
    "sam": lambda: training.gradient("sam", rho),
    "per head": lambda: training.per_head_sam(rho),
  }[method]()
  params = model.init(jax.random.key(3), 6, D, 0.3)
  found = jax.jit(lambda p: training.train(gradient, p, TASK.moments, TASK.final_D, 0.3, steps))(
    params
  )
  times_D, A_T = by_hand(method, params, 0.3, steps, rho)
  assert np.isfinite(times_D[:2]).all()
  np.testing.assert_array_equal(found.times_FxD[0], times_D)
  assert len(found.A_TxDxD) == steps // training.EVERY + 1
  # Later, near a minimum, the direction of eps turns with every rounding error.
  np.testing.assert_allclose(found.A_TxDxD[:12], A_T[:: training.EVERY][:12], rtol=1e-8, atol=1e-11)
  earlier, later = (found.times_FxD[training.FRACTIONS.index(f)] for f in (0.25, 0.75))
  known = np.isfinite(np.array(later))
  assert (np.array(earlier)[known] < times_D[known]).all()
  assert (times_D[known] < np.array(later)[known]).all()


def test_times_by_the_theorem_are_integrals():
  e, u, l, rho = 0.05, 0.4, 0.3, 0.02
  r, p = rho / 3**0.5, 2 * rho / 3**0.5
  for found, speed in (
    (theory.gd_time(e, u, l), lambda v: l**2 * v**2),
    (theory.sam_time_eq9(e, u, l, rho), lambda v: l**2 * (v**2 - p * v)),
    (theory.sam_time(e, u, l, rho), lambda v: l**2 * (v - r) ** 2),
  ):
    integral = scipy.integrate.quad(lambda v, speed=speed: 1 / speed(v), e, u, epsabs=0)[0]
    np.testing.assert_allclose(found, integral, rtol=1e-8)


def test_times_by_the_theorem_are_those_of_training(x64):
  """Of GD by Eq. 10, of SAM by its exact form; Eq. 9 is off."""
  e, u, m, rho, eta = 0.02, 0.2, 0, 0.012, 0.1
  v = {"v": jnp.array([e]), "k": e * jnp.eye(D)[m : m + 1], "q": e * jnp.eye(D)[m : m + 1]}

  def steps(rho):
    """Until v is at u; the goal for A_mm is u^3."""
    final_D = jnp.full(D, 2 * u**3)
    run = lambda p: training.train(  # noqa: E731
      training.gradient("sam", rho), p, TASK.moments, final_D, eta, 4000
    )
    return float(jax.jit(run)(v).times_FxD[0, m])

  unit = 1 / (2 * eta)  # steps in a unit of time
  np.testing.assert_allclose(steps(0.0), unit * theory.gd_time(e, u, L_D[m]), rtol=0.01)
  sam = steps(rho)
  np.testing.assert_allclose(sam, unit * theory.sam_time(e, u, L_D[m], rho), rtol=0.01)
  assert abs(unit * theory.sam_time_eq9(e, u, L_D[m], rho) / sam - 1) > 0.1


def test_theorem_4_4_is_true_of_its_own_times_and_small():
  for rho in (0.01, 0.02, 0.04):  # below sqrt(3) / 2 of the start
    found = theory.entropies(L_D, 0.05, rho)
    assert found["gd"] < found["exact"] < found["eq9"] < found["gd"] + 0.003


@pytest.mark.full
def test_gd_learns_feature_after_feature_with_the_known_plateaus_between(x64):
  keys = jax.random.split(jax.random.key(0), 4)
  params = jax.vmap(lambda key: model.init(key, 16, D, 0.005))(keys)
  run = lambda p: training.train(  # noqa: E731
    training.gradient("sam", 0.0), p, TASK.moments, TASK.final_D, 0.5, 40_000
  )
  trained = jax.jit(jax.vmap(run))(params)
  times_SxD = np.array(trained.times_FxD[:, 0])
  assert (np.diff(times_SxD, axis=1) > 0).all()
  loss_SxT = jax.vmap(jax.vmap(lambda A: model.loss(A, TASK.moments)))(trained.A_TxDxD)
  for times_D, loss_T in zip(times_SxD, np.array(loss_SxT), strict=True):
    between = np.concatenate([[times_D[0] / 2], (times_D[1:] + times_D[:-1]) / 2]).astype(int)
    np.testing.assert_allclose(loss_T[between // 10], TASK.plateaus[:D], atol=0.012)
    np.testing.assert_allclose(loss_T[-1], TASK.plateaus[D], atol=1e-4)


# ---- Upsampling ----------------------------------------------------------------------------------


def test_two_clusters_are_found_whatever_the_split_they_start_from():
  rng = np.random.default_rng(0)
  high_P = np.arange(300) < 40
  x_PxK = rng.normal(size=(300, 5)) * 0.1 + np.where(high_P, 3.0, 1.0)[:, None]
  order_P = rng.permutation(300)
  found_P = up.hard(x_PxK[order_P], np.ones(300), "trajectory")
  np.testing.assert_array_equal(found_P, high_P[order_P])


def test_what_is_hard_depends_on_what_is_looked_at():
  """Four kinds: (untrained loss, at the first checkpoint, at the last)."""
  kinds = {
    "large, learned": (100.0, 90.0, 10.0),
    "large, not learned": (100.0, 100.0, 99.0),
    "small, learned": (1.0, 0.9, 0.1),
    "small, not learned": (1.0, 1.0, 0.99),
  }
  losses = np.repeat(np.array(list(kinds.values())), 10, 0)

  def hard(feature):
    found = up.hard(losses[:, 1:], losses[:, 0], feature)
    return {kind for kind, mask in zip(kinds, found.reshape(4, 10), strict=True) if mask.all()}

  assert hard("relative") == {"large, not learned", "small, not learned"}
  assert hard("last") == {"large, not learned"}
  assert hard("trajectory") == {"large, learned", "large, not learned"}


def test_controls_have_as_many_sequences():
  rng = np.random.default_rng(0)
  hard_P = rng.random(200) < 0.3
  found = up.controls(hard_P, rng)
  assert found["easy"].sum() == found["random"].sum() == hard_P.sum()
  assert not (found["easy"] & hard_P).any() and (found["random"] & hard_P).any()
  most_P = np.arange(200) < 150
  assert up.controls(most_P, rng)["easy"].sum() == 50  # all that there are


def test_checkpoints_of_the_proxy():
  assert up.checkpoints(1500) == [300, 600, 900, 1200, 1500]


@pytest.mark.full
def test_arms_share_start_and_data_and_upsampling_counts_twice(x64):
  settings = Settings(heads=3, sequences=60, steps=20, proxy_steps=50, seeds=2, first_seed=5)
  start = experiment.prepare(settings, with_proxy=True)
  assert start.params["k"].shape == (2, 3, D) and start.sequences.y_P.shape == (2, 60)
  later = experiment.prepare(dataclasses.replace(settings, first_seed=6, seeds=1), False)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a[1], b[0], rtol=1e-12),
    (start.params, start.sequences),
    (later.params, later.sequences),
  )
  results = {r.arm.name: r for r in experiment.run(settings)}
  assert list(results) == [arm.name for arm in ARMS]
  for r in results.values():  # the same at step 0
    np.testing.assert_array_equal(r.test_SxT[:, 0], results["GD"].test_SxT[:, 0])
    assert (r.upsampled > 0) == bool(r.arm.upsampled)
  mask_P = start.upsampled["hard, relative"][1]
  twice = jax.tree.map(lambda x: jnp.concatenate([x[1], x[1][mask_P]]), start.sequences)
  moments = model.moments(twice, jnp.ones(len(twice.y_P)))
  alone = jax.tree.map(lambda x: x[1], start.params)
  trained = training.train(
    training.gradient("sam", 0.0), alone, moments, TASK.final_D, settings.step_size, 20
  )
  expected = jax.vmap(lambda A: model.loss(A, TASK.moments))(trained.A_TxDxD)
  found = results["upsample hard, relative"].test_SxT[1]
  np.testing.assert_allclose(found, expected, rtol=1e-10)


# ---- The numbers ---------------------------------------------------------------------------------


def test_arms_are_those_of_the_specification():
  assert {a.rho for a in ARMS if a.method == "sam" and not a.per_head} == {0, 0.5, 1, 2, 3}
  assert {(a.method, a.rho) for a in ARMS if a.method != "sam"} == {
    ("func_sam", 1.0),
    ("logit_sam", 1.0),
  }
  hard = {f"hard, {feature}" for feature in ("relative", "last", "trajectory")}
  assert {a.upsampled for a in ARMS} == {"", "easy", "random", *hard}
  assert [a.name for a in ARMS if a.step == 1.3] == [page.FASTER]
  assert {page.SAM, page.HARD, page.HALF, *page.DRAWN} <= {a.name for a in ARMS}


def test_difference_is_paired_and_leaves_out_what_is_missing():
  rng = np.random.default_rng(0)
  base_S = rng.normal(size=30) * 10
  delta_S = 0.1 + 0.2 * rng.normal(size=30)
  values_S = base_S + delta_S
  values_S[3], base_S[8] = np.nan, np.nan
  found = summary.difference(values_S, base_S)
  known = np.delete(delta_S, [3, 8])
  low, high = scipy.stats.ttest_1samp(known, 0).confidence_interval(0.95)
  np.testing.assert_allclose(
    [found["mean"], found["low"], found["high"]], [known.mean(), low, high]
  )
  assert found["pairs"] == 28
  nothing = summary.difference(np.full(3, np.nan), np.ones(3))
  assert nothing == {"pairs": 0, "mean": None, "low": None, "high": None}


def made_up(arm, times_SxD, level=0.0):
  """Test loss is the step, and something that depends on the seed."""
  times_SxD = np.array(times_SxD, float)
  steps_T = np.arange(0, 6001, training.EVERY)
  test_SxT = steps_T[None] + level + 0.1 * np.arange(len(times_SxD))[:, None]
  return Result(arm, 0.0, np.repeat(times_SxD[:, None], 3, 1), test_SxT)


def test_summary_counts_unfinished_and_stuck_runs():
  nan = np.nan
  base = made_up(ARMS[0], [[1, 2, 3, 4], [1, 2, 3, 10], [1, 2, 3, 4], [1, 2, nan, nan]])
  arm = Arm("SAM", rho=1.0)
  result = made_up(arm, [[2, 4, 6, 8], [1, 2, nan, 3], [nan] * 4, [1, 2, 3, 4]], level=0.5)
  found = summary.summarize(Settings(seeds=4), result, base)
  assert (found["unfinished"], found["stuck"], found["difference"]["pairs"]) == (2, 1, 1)
  np.testing.assert_allclose(found["entropy"], np.log(4))
  np.testing.assert_allclose(found["difference"]["mean"], 0, atol=1e-12)
  assert found["median_times"][0] == 1.5 and found["median_times"][3] == np.inf
  assert found["at_the_end"]["pairs"] == 1
  np.testing.assert_allclose(found["at_the_end"]["mean"], 0.5)


def test_budgets_in_steps_and_in_gradients():
  settings, times = Settings(seeds=2), [[1, 2, 3, 4]] * 2
  base = made_up(ARMS[0], times)
  for arm, at_4000 in (
    (Arm("GD"), 4000),
    (Arm("SAM", rho=1.0), 2000),
    (Arm("per head", rho=1.0, per_head=True), 2000),
    (Arm("up", upsampled="hard, relative"), 2500),
  ):
    result = made_up(arm, times)
    steps = summary.budgets(settings, result, base, by_gradients=False)
    assert {b: f["median"] for b, f in steps.items()} == {
      str(b): pytest.approx(b + 0.05) for b in (1000, 2000, 4000, 6000)
    }
    gradients = summary.budgets(settings, result, base, by_gradients=True)
    assert gradients["4000"]["median"] == pytest.approx(at_4000 + 0.05)
    assert gradients["4000"]["mean"] == pytest.approx(at_4000 - 4000)
    assert ("1000" in gradients) == (not arm.upsampled)  # its proxy takes 1500
  short = dataclasses.replace(settings, steps=2000)
  assert list(summary.budgets(short, base, base, by_gradients=False)) == ["1000", "2000"]


# ---- The page ------------------------------------------------------------------------------------


def interval(mean, half):
  return {"pairs": 9, "mean": mean, "low": mean - half, "high": mean + half}


def test_sentences_claim_no_more_than_the_intervals():
  def row(found, unfinished=0):
    at_steps = {"1000": found, "2000": found}
    return {"difference": found, "unfinished": unfinished, "at_steps": at_steps}

  rows = {
    "GD": row(interval(0, 0)),
    "up": row(interval(0.2, 0.1)),
    "down": row(interval(-0.2, 0.1)),
    "unclear": row(interval(0.1, 0.2), unfinished=7),
    "missing": row({"pairs": 1, "mean": 0.5, "low": None, "high": None}),
  }
  assert page.learning(rows) == [
    "More evenly than GD: up (+0.200 ± 0.100).",
    "Less evenly than GD: down (-0.200 ± 0.100).",
    "No clear difference to GD: unclear (+0.100 ± 0.200, 7 unfinished).",
  ]
  assert page.by_budget(rows["up"], "at_steps") == "higher at 1000 and 2000"
  assert page.by_budget(rows["missing"], "at_steps") == "no clear difference at 1000 and 2000"
  assert page.loss_verdict(interval(1e-5, 1e-6)) == "same"  # not seen in four decimals
  assert page.signed(interval(-1e-6, 1e-6), 3) == "+0.000 ± 0.000"


@pytest.mark.parametrize(
  "words, said",
  [
    ("--out=x --set=stepz=10", "did you mean steps"),
    ("--out=x --set=heads=many", "heads is a number, like 16"),
    ("--out=x --set=steps=15", "multiple of 10"),
    ("--out=x --set=proxy_steps=20", "multiple of 50"),
    ("--out=x --seeds=0", "positive"),
    ("--seeds=2", "required: --out"),
    ("--out=x --scale=mini", "unrecognized arguments: --scale=mini"),
  ],
)
def test_mistakes_on_the_command_line_are_named(words, said):
  with pytest.raises(UsageError, match=said):
    load_script("scripts/reproduce.py").main(["reproduce.py", "simplicity", *words.split()])


@pytest.mark.full
def test_the_command_writes_its_page(tmp_path, capsys):
  words = "--seeds=3 --set=first_seed=0 --set=sequences=500 --set=steps=1000 --set=sigma=0.2"
  argv = ["scripts/reproduce.py", "simplicity", f"--out={tmp_path}", *words.split()]
  load_script("scripts/reproduce.py").main([*argv, "--set=proxy_steps=300"])
  assert f"written: {tmp_path}/README.md" in capsys.readouterr().out
  results = json.loads((tmp_path / "results.json").read_text())
  assert [row["arm"] for row in results["arms"]] == [arm.name for arm in ARMS]
  assert results["settings"]["steps"] == 1000 and len(results["other"]) == 2
  rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
  assert len(rows) == 3 * (len(ARMS) + 2 * len(experiment.OTHER_ARMS))
  assert {(r["heads"], r["sigma"]) for r in rows} == {("16", "0.2"), ("5", "0.2"), ("16", "0.04")}
  gd = [r for r in rows if (r["heads"], r["sigma"], r["arm"]) == ("16", "0.2", "GD")]
  found = results["arms"][0]
  entropies = [float(r["entropy"]) for r in gd if r["entropy"]]
  np.testing.assert_allclose(found["entropy"], np.mean(entropies), atol=1e-5)
  assert found["unfinished"] == 3 - len(entropies)
  median = np.median([float(r["test_loss_1000"]) for r in gd])
  np.testing.assert_allclose(found["at_steps"]["1000"]["median"], median, atol=1e-6)
  text = (tmp_path / "README.md").read_text()
  assert f"| GD | {found['entropy']:.3f} |" in text and f"{median:.4f}" in text
  assert "1.0000, 0.6406, 0.3774, 0.2098, 0.1360" in text and "--set=steps=1000" in text
  for row in results["arms"]:
    assert text.count(f"| {row['arm']} |") >= 3
  for name in ("curves", "differences"):
    assert f"({name}.svg)" in text and (tmp_path / f"{name}.svg").stat().st_size > 5000
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
  assert jax.numpy.ones(()).dtype == np.float32  # float64 was for the experiment alone
