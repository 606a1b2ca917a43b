"""Linear attention on in-context regression, against what is known of it in closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nanosam
from nanosam.model import linear_attention as model

pytestmark = pytest.mark.usefixtures("x64")
TASK = model.Task((0.4, 0.3, 0.2, 0.1), N=31)
D = 4
L_D = np.array(TASK.spectrum)
A_D = L_D**2 + (L_D + 1) / 31 * L_D
WHITE = model.Task((1.0, 1.0, 1.0, 1.0), N=31)


def merged_matrix(params, batch=None):
  """A if keys and queries are merged into one matrix for each head."""
  return jnp.einsum("h,hij->ij", params["v"], params["U"])


@functools.cache
def gradient(method="sam", rho=0.0, outputs=model.matrix, task=TASK):
  """`sam` at rho 0 is the plain gradient."""
  call = nanosam.value_and_grad(outputs, model.loss, method=method, rho=rho)
  return jax.jit(lambda params: call(params, task.moments)[1])


def aligned(v, m, heads=1):
  """The ansatz: one head is k = q = v e_m, the others are 0."""
  e_D = jnp.eye(D)[m]
  params = {"v": jnp.zeros(heads), "k": jnp.zeros((heads, D)), "q": jnp.zeros((heads, D))}
  return {"v": params["v"].at[0].set(v)} | {n: params[n].at[0].set(v * e_D) for n in ("k", "q")}


def random_params(seed=0, heads=3, sigma=1.0):
  return model.init(jax.random.key(seed), heads, D, sigma)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def descend(gradient, params, step_size, steps):
  """Parameters before each of the steps."""

  def step(p, _):
    return jax.tree.map(lambda w, g: w - step_size * g, p, gradient(p)), p

  return jax.lax.scan(step, params, length=steps)[1]


# ---- The model -----------------------------------------------------------------------------------


def test_plateaus():
  np.testing.assert_allclose(TASK.plateaus, [1, 0.6406, 0.3774, 0.2098, 0.1360], atol=5e-5)
  for m, plateau in enumerate(TASK.plateaus):
    A_DxD = jnp.diag(jnp.where(jnp.arange(D) < m, L_D / A_D, 0))
    np.testing.assert_allclose(model.loss(A_DxD, TASK.moments), plateau, rtol=1e-12)
  best = jax.grad(model.loss)(jnp.diag(jnp.asarray(TASK.final_D)), TASK.moments)
  np.testing.assert_allclose(best, 0, atol=1e-15)


def test_loss_of_all_sequences_is_the_closed_form_and_the_mean_over_many():
  A_DxD = np.array(jax.random.normal(jax.random.key(1), (D, D)))
  S = np.diag(L_D)
  exact = 1 - 2 * np.trace(S @ A_DxD @ S) + np.trace(np.diag(A_D) @ A_DxD @ S @ A_DxD.T)
  np.testing.assert_allclose(model.loss(A_DxD, TASK.moments), exact, rtol=1e-12)
  sequences = jax.jit(lambda key: TASK.sample(key, 40_000))(jax.random.key(2))
  mean = jnp.mean(model.squared_errors(A_DxD, sequences))
  np.testing.assert_allclose(mean, exact, rtol=0.04)
  found = model.loss(A_DxD, model.moments(sequences, jnp.ones(40_000)))
  np.testing.assert_allclose(found, mean, rtol=1e-10)


def test_a_sequence_of_weight_two_is_two_sequences():
  sequences = TASK.sample(jax.random.key(0), 5)
  twice = jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), sequences)
  weighted = model.moments(sequences, jnp.array([2.0, 2, 1, 1, 1]))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
    weighted,
    model.moments(twice, jnp.ones(7)),
  )


def test_the_layer_predicts_what_the_reduced_model_does():
  """The weights that the reduced model leaves out are random here: they do not matter."""
  H, N, keys = 3, 7, jax.random.split(jax.random.key(5), 6)
  params = random_params()
  value_HxExE = jax.random.normal(keys[0], (H, D + 1, D + 1))
  value_HxExE = value_HxExE.at[:, D].set(0).at[:, D, D].set(params["v"])
  key_HxRxE = jnp.concatenate([params["k"], jnp.zeros((H, 1))], 1)[:, None]
  query_HxRxE = jnp.concatenate([params["q"], jax.random.normal(keys[1], (H, 1))], 1)[:, None]
  x_NxD, y_N = jax.random.normal(keys[2], (N, D)), jax.random.normal(keys[3], (N,))
  xq_D = jax.random.normal(keys[4], (D,))
  # X + sum_h W_V X X^T W_K^T W_Q X / N; the prediction is the last entry of the last column.
  X = np.concatenate([np.concatenate([x_NxD, xq_D[None]]).T, np.append(y_N, 0)[None]])
  layer = X.copy()
  for V, K, Q in zip(*map(np.asarray, (value_HxExE, key_HxRxE, query_HxRxE)), strict=True):
    layer += V @ X @ X.T @ K.T @ Q @ X / N
  beta_D = y_N @ x_NxD / N
  expected = beta_D @ model.matrix(params) @ xq_D
  np.testing.assert_allclose(layer[-1, -1], expected, rtol=1e-10)


# ---- One aligned head ----------------------------------------------------------------------------


def test_each_feature_has_the_fixed_point_of_eq_3():
  for m, l in enumerate(L_D):
    v = (l + (l + 1) / 31) ** (-1 / 3)
    np.testing.assert_allclose(v**3, TASK.final_D[m], rtol=1e-12)
    for g in jax.tree.leaves(gradient()(aligned(v, m, heads=2))):
      np.testing.assert_allclose(g, 0, atol=1e-15)


@pytest.mark.parametrize("method", ["gd", "sam", "func_sam", "logit_sam", "penalty_sam"])
def test_the_flow_of_an_aligned_head(method):
  """J and R move to v - r, each or both; the penalty is the paper's first-order term (C.2)."""
  v, rho = 0.4, 0.1
  found = gradient() if method == "gd" else gradient(method, rho)
  for m, (l, a) in enumerate(zip(L_D, A_D, strict=True)):
    J, R, r = lambda v: v**2, lambda v, l=l, a=a: l**2 - l * a * v**3, rho / 3**0.5
    flow = {
      "gd": J(v) * R(v),
      "sam": J(v - r) * R(v - r),
      "func_sam": J(v - r) * R(v),
      "logit_sam": J(v) * R(v - r),
      "penalty_sam": J(v) * R(v) + r * (5 * l * a * v**4 - 2 * l**2 * v),
    }[method]
    g, expected = found(aligned(v, m, heads=2)), aligned(-2 * flow, m, heads=2)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
    jax.tree.map(close, g, expected)


def test_sam_from_e_to_u_takes_the_steps_of_gd_from_e_minus_r_to_u_minus_r():
  e, rho = 0.2, 0.1
  r = rho / 3**0.5
  sam = descend(gradient("sam", rho), aligned(e, 1), 0.2, 400)["v"][:, 0]
  gd = descend(gradient(), aligned(e - r, 1), 0.2, 400)["v"][:, 0]
  below = np.argmin(np.array(sam) < TASK.final_D[1] ** (1 / 3))  # beyond, eps turns around
  assert below > 100 and sam[below - 1] > 1
  np.testing.assert_allclose(sam[:below], gd[:below] + r, rtol=1e-9)


def test_rho_of_sqrt_3_e_is_a_trap():
  e = 0.1
  for factor, escapes in ((0.9, True), (1.0, False), (1.2, False)):
    rho = factor * 3**0.5 * e
    v = np.array(descend(gradient("sam", rho), aligned(e, 0), 0.2, 3000)["v"][:, 0])
    r = rho / 3**0.5
    assert (v[-1] > 1) == escapes
    if not escapes:
      assert v.max() <= r * (1 + 1e-9) and v[-1] > 0.95 * r  # it ends at v = r


def test_hessian_of_the_queries_and_the_norm_of_the_correlation():
  """Where the paper's appendix has other formulas."""
  p = random_params(heads=1)
  value = lambda q: model.loss(model.matrix(p | {"q": q[None]}), TASK.moments)  # noqa: E731
  k, v = np.array(p["k"][0]), float(p["v"][0])
  correct = 2 * v**2 * (k @ np.diag(A_D) @ k) * np.diag(L_D)
  printed = 2 * v**2 * np.diag(L_D) @ np.outer(k, k) @ np.diag(A_D)
  found = np.array(jax.hessian(value)(p["q"][0]))
  np.testing.assert_allclose(found, correct, rtol=1e-10)
  assert np.abs(found - printed).max() > 0.1 * np.abs(found).max()
  gamma = np.linalg.norm(TASK.moments.yz_DxD)
  np.testing.assert_allclose(gamma, np.linalg.norm(np.diag(L_D**2)), rtol=1e-12)


# ---- Training ------------------------------------------------------------------------------------


def conserved(params):
  """Of each head: |k|^2 - v^2 and |q|^2 - v^2."""
  squares = {name: jnp.sum(params[name] ** 2, -1) - params["v"] ** 2 for name in ("k", "q")}
  return jnp.stack([squares["k"], squares["q"]])


def test_gd_flow_conserves_what_sam_does_not():
  p = random_params(sigma=0.4)
  rate = lambda g: jax.jvp(conserved, (p,), (g,))[1]  # noqa: E731
  np.testing.assert_allclose(rate(gradient()(p)), 0, atol=1e-14)
  assert np.abs(rate(gradient("sam", 0.2)(p))).max() > 1e-3
  # Steps conserve it up to their size.
  drift = [
    np.abs(conserved(jax.tree.map(lambda x: x[-1], descend(gradient(), p, eta, n))) - conserved(p))
    for eta, n in ((0.1, 401), (0.01, 4001))
  ]
  assert drift[1].max() < 0.15 * drift[0].max() < 0.02


def test_merged_keys_and_queries_with_white_data_follow_a_logistic():
  """s = |v|^2 obeys s' = 2 s (gamma - alpha s), gamma = |S^2|_F = sqrt(D), alpha = a."""
  alpha, gamma, s0, eta = 1 + (1 + D) / 31, D**0.5, 1e-3, 1e-3
  v_H = jnp.array([0.6, -0.8]) * s0**0.5
  params = {"v": v_H, "U": jnp.einsum("h,ij->hij", v_H, jnp.eye(D) / D**0.5)}
  grad = gradient(outputs=merged_matrix, task=WHITE)
  s_T = np.sum(np.array(descend(grad, params, eta, 4000)["v"]) ** 2, 1)
  growth_T = np.exp(2 * gamma * 2 * eta * np.arange(4000))  # tau = 1 / (2 eta)
  expected_T = gamma * growth_T / (alpha * (growth_T - 1) + gamma / s0)
  np.testing.assert_allclose(s_T, expected_T, rtol=0.02)
  np.testing.assert_allclose(s_T[-1], gamma / alpha, rtol=1e-3)


def test_merged_keys_and_queries_learn_white_data_in_one_drop():
  sigma = 1e-3
  v_H, U_HxDxD = (sigma * jax.random.normal(jax.random.key(3), s) for s in ((8,), (8, D, D)))
  grad = gradient(outputs=merged_matrix, task=WHITE)
  trajectory = descend(grad, {"v": v_H, "U": U_HxDxD}, 0.02, 1000)
  A_TxDxD = np.array(jax.vmap(merged_matrix)(trajectory))
  learned_TxD = np.diagonal(A_TxDxD, axis1=1, axis2=2) > WHITE.final_D / 2
  assert learned_TxD[-1].all()
  steps_D = learned_TxD.argmax(0)
  assert np.ptp(steps_D) < 0.05 * steps_D.max()
