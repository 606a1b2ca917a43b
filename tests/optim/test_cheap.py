"""The cheaper rows against exact statements: what they skip, what they remember, what they cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.steps import VOCAB, bad_data, make_step, steps
from helpers.toy import B, D, F, V, close, grad, loss_fn, make_method, run, scaled, setting, toy
from helpers.training import assert_same_run
from jax.flatten_util import ravel_pytree

from nanosam.data.batch import Batch
from nanosam.optim import direction as along
from nanosam.optim.direction import layerwise, perturbation
from nanosam.optim.when import NormStatistics
from nanosam.run import flops
from nanosam.run.metrics_file import read_metrics


def ravelled(tree):
  return np.asarray(ravel_pytree(tree)[0])


def added(a, b):
  return jax.tree.map(jnp.add, a, b)


@pytest.mark.parametrize("kind", ["every", "look"])
@pytest.mark.parametrize("name", ["sam", "func_sam", "precond_func_sam"])
def test_with_a_second_pass_at_every_step_it_is_the_method_itself(kind, name):
  assert make_method(f"{kind}_{name}", every=1)[:3] == make_method(name)[:3]


def test_every_k_steps_and_plain_ones_in_between(x64):
  params, batch, moments = setting()
  for updates, same in ((0, "sam"), (1, "adamw"), (4, "adamw"), (5, "sam"), (10, "sam")):
    out = run("every_sam", params, batch, moments._replace(updates=updates), 0.3)
    expected = run(same, params, batch, moments, 0.3)
    close(out.gradient, expected.gradient, rtol=0, atol=0)
    assert out.metrics["opt/perturbed"] == (same == "sam")
    assert out.metrics["guard/no_perturbation"] == 0  # that is for directions without a length


@pytest.mark.parametrize("name", ["sam", "precond_func_sam"])
def test_look_reuses_the_part_that_is_orthogonal_to_the_gradient(x64, name):
  params, batch, moments = setting()
  first = run(f"look_{name}", params, batch, moments, 0.3)
  full = run(name, params, batch, moments, 0.3).gradient
  close(first.gradient, full, rtol=0, atol=0)
  g, s = ravelled(grad(params, batch)), ravelled(full)
  cosine = g @ s / np.linalg.norm(g) / np.linalg.norm(s)
  v = s - np.linalg.norm(s) * cosine * g / np.linalg.norm(g)  # the paper's Eq. 8
  assert abs(v @ g) < 1e-12 * np.linalg.norm(v) * np.linalg.norm(g) + 1e-15

  elsewhere = jax.tree.map(lambda x: 1.1 * x, params)
  later = moments._replace(updates=3)
  g = ravelled(grad(elsewhere, batch))
  ratio = np.linalg.norm(v) / np.linalg.norm(ravelled(grad(params, batch)))
  for alpha, length in ((0.7, 0.7), (0.2, 0.2), (0.0, ratio)):
    out = run(f"look_{name}", elsewhere, batch, later, 0.3, memory=first.memory, look_alpha=alpha)
    expected = g + length * np.linalg.norm(g) * v / np.linalg.norm(v)
    np.testing.assert_allclose(ravelled(out.gradient), expected, rtol=1e-8)
    close(out.memory, first.memory, rtol=0, atol=0)
  still = run(
    f"look_{name}", elsewhere, batch, later, jnp.asarray(0.0), memory=first.memory
  ).gradient
  close(still, grad(elsewhere, batch))


def test_look_reuses_nothing_of_a_bad_second_pass(x64):
  params, batch, moments = setting()
  out = run("look_sam", params, batch, moments, 1e300)
  assert not np.isfinite(ravelled(out.gradient)).all()
  assert not ravelled(out.memory).any()


@pytest.mark.parametrize("name", ["sam", "func_sam"])
def test_stale_is_the_method_along_the_gradient_of_the_step_before(x64, name):
  params, batch, moments = setting()
  before = grad(jax.tree.map(lambda x: 0.9 * x, params), batch)
  out = run(f"stale_{name}", params, batch, moments, 0.3, memory=before)
  same = run(f"momentum_{name}", params, batch, moments._replace(mu=before), 0.3)
  close(out.gradient, same.gradient, rtol=0, atol=0)
  close(out.memory, out.gradient, rtol=0, atol=0)
  first = run(f"stale_{name}", params, batch, moments, 0.3)  # nothing to go by
  close(first.gradient, grad(params, batch))
  assert first.metrics["guard/no_perturbation"] == 1
  skipped = run(f"stale_{name}", params, batch, moments, jnp.asarray(0.0), memory=before)
  close(skipped.memory, grad(params, batch))


def test_a_random_direction_has_the_length_and_depends_on_the_step_alone(x64):
  params, batch, moments = setting()
  go = lambda updates: run(  # noqa: E731
    "random_sam", params, batch, moments._replace(updates=updates), 0.3
  )
  noise = along.random.substitute(params, moments._replace(updates=4))
  out = go(4)
  close(out.gradient, grad(added(params, scaled(noise, 0.3)), batch))
  close(out.metrics["opt/eps_norm"], 0.3)
  flat = ravelled(noise)
  other = ravelled(along.random.substitute(params, moments._replace(updates=5)))
  assert abs(flat.std() - 1) < 5 / flat.size**0.5
  assert abs(flat @ other) < 5 * flat.size**0.5
  assert len(set(flat)) == flat.size  # no parameter repeats another's


@pytest.mark.parametrize("residual", ["store", "recompute"])
def test_a_direction_of_part_of_the_batch_and_a_gradient_of_all_of_it(x64, residual):
  params, batch, moments = setting()
  part = Batch(*(x if x is None else x[::2] for x in batch))
  g = grad(params, part)
  model = toy(residual=residual)
  go = lambda name, **kw: run(name, params, batch, moments, 0.3, model=model, **kw)  # noqa: E731
  loss = run("adamw", params, batch, moments, 0.0).metrics["train/loss"]
  for micro in (1, 4):
    sub = dict(ascent_fraction=0.5, micro=micro)
    close(go("sam", **sub).gradient, grad(added(params, scaled(g, 0.3)), batch))
    out = go("func_sam", **sub)
    same = run("momentum_func_sam", params, batch, moments._replace(mu=g), 0.3)
    close(out.gradient, same.gradient)
    close(out.metrics["train/loss"], loss)  # of the whole batch
  method = make_method("precond_sam")
  eps, _ = perturbation(method.direction.ray(g, params, moments, method.opt), 0.3)
  close(go("precond_sam", ascent_fraction=0.5).gradient, grad(added(params, eps), batch))
  still = run("sam", params, batch, moments, jnp.asarray(0.0), ascent_fraction=0.5)
  close(still.gradient, grad(params, batch))


def test_the_forward_pass_of_part_of_the_batch_is_not_repeated(tiny_config):
  """(4 + 2 gamma) b + (3 + 2 gamma) u on the functional path."""
  c = tiny_config
  m, tokens, gamma = c.model, c.batch_size * c.model.L, 0.25
  c.head.update(chunk=m.L // 2, residual="store")
  b = m.N * (8 * m.D**2 + 4 * m.D * m.F + 4 * m.L * m.D)
  u = 2 * m.D * VOCAB
  c.opt.update(method="func_sam", ascent_fraction=gamma)
  count = lambda: flops.count(make_step(c).trace().jaxpr)  # noqa: E731
  assert count() == ((4 + 2 * gamma) * b + (3 + 2 * gamma) * u) * tokens
  c.opt.method = "sam"
  assert count() == (3 + 3 * gamma) * (b + u) * tokens


def test_ae_sam_perturbs_where_the_gradient_is_long_among_those_so_far(x64):
  params, batch, moments = setting()
  for threshold, same in ((-1e30, "sam"), (1e30, "adamw")):
    out = run("ae_sam", params, batch, moments, 0.3, ae_start=threshold, ae_end=threshold)
    close(out.gradient, run(same, params, batch, moments, 0.3).gradient, rtol=0, atol=0)
  square = float(np.sum(ravelled(grad(params, batch)) ** 2))
  for before, updates in ((0.9, 0), (0.9, 9), (1.1, 9), (2.0, 9), (2.0, 10)):
    mean, variance = before * square, 0.04 * square**2
    at = moments._replace(updates=updates)
    memory = jax.tree.map(jnp.asarray, (mean, variance))
    out = run("ae_sam", params, batch, at, 0.3, memory=NormStatistics(*memory))
    mean = 0.9 * mean + 0.1 * square
    variance = 0.9 * variance + 0.1 * (square - mean) ** 2
    close(tuple(out.memory), (mean, variance), rtol=1e-6)
    threshold = (updates / 10) * -1 + (1 - updates / 10) * 1  # the paper's lambda_1 and lambda_2
    assert out.metrics["opt/perturbed"] == (square >= mean + threshold * variance**0.5)


def test_le_sam_aims_at_a_rise_of_the_loss_and_is_capped(x64):
  params, batch, moments = setting()
  norm = float(np.linalg.norm(ravelled(grad(params, batch))))
  for sigma, most, length in ((0.1, 10.0, 0.1 / norm), (0.1, 0.01, 0.01)):
    out = run("le_sam", params, batch, moments, sigma, rho_max=most)
    close(out.gradient, run("sam", params, batch, moments, length).gradient)
    close(out.metrics["opt/eps_norm"], length)


def test_the_arrays_with_the_longest_gradients_alone(x64):
  params, batch, moments = setting()
  whole = run("top_sam", params, batch, moments, 0.3, top_share=1.0).gradient
  close(whole, run("sam", params, batch, moments, 0.3).gradient)
  g = grad(params, batch)
  norms = sorted(float(optax.tree.norm(x)) for x in jax.tree.leaves(g))
  kept = jax.tree.map(lambda x: x * (optax.tree.norm(x) >= norms[-2]), g)
  eps = jax.tree.map(lambda x: 0.3 * x / optax.tree.norm(g), kept)
  out = run("top_sam", params, batch, moments, 0.3, top_share=0.5).gradient
  close(out, grad(added(params, eps), batch))


def test_esam_perturbs_a_share_of_the_weights_and_follows_the_sharpest_data(x64):
  params, batch, moments = setting()
  sam = run("sam", params, batch, moments, 0.3)
  close(run("esam", params, batch, moments, 0.3).gradient, sam.gradient)  # both shares 1
  method = make_method("esam", weight_share=0.5)
  ray = method.direction.ray(grad(params, batch), params, moments, method.opt)
  eps, _ = perturbation(ray, 0.3)
  np.testing.assert_allclose(np.linalg.norm(ravelled(eps)), 0.3 / 0.5, rtol=1e-9)
  assert abs(np.mean(ravelled(eps) != 0) - 0.5) < 0.15
  there = added(params, eps)
  rows = [Batch(*(x if x is None else x[i : i + 1] for x in batch)) for i in range(B)]
  rise = [float(loss_fn(there, row) - loss_fn(params, row)) for row in rows]
  top = np.sort(np.argsort(rise)[-2:])
  chosen = Batch(*(x if x is None else x[top] for x in batch))
  for micro in (1, 2):
    out = run("esam", params, batch, moments, 0.3, weight_share=0.5, data_share=0.5, micro=micro)
    close(out.gradient, grad(there, chosen), rtol=1e-6)  # weights are float32
    close(out.metrics["train/loss_perturbed"], loss_fn(there, chosen), rtol=1e-6)
    close(out.metrics["train/loss"], loss_fn(params, batch))


def test_layerwise_each_array_is_perturbed_by_its_natural_size(x64):
  params, batch, moments = setting(False)
  g = grad(params, batch)
  lengths = {
    "embed": (D / V) ** 0.5,
    "unembed": (V / D) ** 0.5,
    "up": (F / D) ** 0.5,
    "down": (D / F) ** 0.5,
  }
  g["scale"], g["stacked"] = jnp.arange(1.0, 6), jnp.arange(1.0, 13).reshape(2, 2, 3)
  method = make_method("sam")
  eps, _ = perturbation(layerwise(method.direction.ray(g, params, moments, method.opt)), 0.3)
  for name, factor in lengths.items():
    x = eps["mlp"].get(name, eps.get(name))
    np.testing.assert_allclose(np.linalg.norm(x), 0.3 * factor, rtol=1e-9)
  np.testing.assert_allclose(np.linalg.norm(eps["scale"]), 0.3 * 5**0.5, rtol=1e-9)
  for layer in eps["stacked"]:
    np.testing.assert_allclose(np.linalg.norm(layer), 0.3 * (3 / 2) ** 0.5, rtol=1e-9)
  nowhere = jax.tree.map(jnp.zeros_like, g)
  eps, usable = perturbation(layerwise(method.direction.ray(nowhere, params, moments, None)), 0.3)
  assert not usable and not any(jnp.any(x) for x in jax.tree.leaves(eps))


def test_a_rejected_step_leaves_the_memory_alone(tiny_config):
  c = tiny_config
  c.opt.update(method="look_sam", rho=0.3, every=2)
  c.guard.policy = "skip"
  one, _ = steps(c, 1)
  for n in (2, 3):  # the second batch is bad, so the third makes the second update
    state, history = steps(c, n, change=bad_data(np.nan))
    assert [h["opt/perturbed"] for h in history] == [1, 0, 0][:n]
    jax.tree.map(np.testing.assert_array_equal, state.memory, one.memory)
    assert int(history[-1]["guard/nonfinite"]) == 1
  assert max(np.abs(x).max() for x in jax.tree.leaves(one.memory)) > 0


def test_rows_that_remember_nothing_have_the_state_they_always_had(tiny_config):
  c = tiny_config
  for method, rho in (("sam", 0.1), ("every_sam", 0.1), ("look_sam", 0.0)):
    c.opt.update(method=method, rho=rho)
    fields = [field.name for field in dataclasses.fields(make_step(c).abstract_state)]
    assert fields == ["step", "params", "opt_state", "guard"]  # what a checkpoint must match


@pytest.mark.full
@pytest.mark.parametrize("method", ["look_func_sam", "stale_sam"])
def test_a_killed_run_resumes_with_its_memory(commands, tmp_path, method):
  straight, killed = tmp_path / "straight", tmp_path / "killed"
  settings = {"opt__method": method, "opt__every": 3}
  assert commands.train(straight, **settings).code == 0
  commands.train(killed, fault="SIGKILL@step:11", **settings)
  assert commands.train(killed, **settings).code == 0
  assert_same_run(killed, straight)
  compute = [r["compute"] for r in read_metrics(killed / "metrics.jsonl") if "opt/rho" in r]
  spent = np.diff(compute, prepend=0)  # each step by what was executed, also across the kill
  if method == "look_func_sam":
    assert np.all((spent > 1.5 * spent.min()) == (np.arange(16) % 3 == 0))
  else:
    assert np.all(spent == spent[0])
