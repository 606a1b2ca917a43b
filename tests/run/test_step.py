"""The step that joins a method with its base: metrics, layouts, devices, buffers."""

import math
import re

import jax
import numpy as np
import pytest
from helpers.steps import batches, make_step, steps

from nanosam.model import sharding
from nanosam.model.sharding import STACKED
from nanosam.optim.methods import METHODS
from nanosam.run.step import TrainStep

OF_THE_PAPER = list(METHODS)[:12]  # the rest differ from these in a direction, or in when


@pytest.mark.parametrize(
  "method, micro",
  [
    ("precond_func_sam", 2),
    *(pytest.param(name, 1, marks=pytest.mark.full) for name in OF_THE_PAPER),
    *(
      pytest.param(name, 2, marks=pytest.mark.full)
      for name in METHODS
      if "every" not in name and name != "esam"
    ),
    pytest.param("esam", 1, marks=pytest.mark.full),  # of 16 rows it takes 8, one for each device
    pytest.param("func_sam ascent_fraction", 1, marks=pytest.mark.full),
    pytest.param("precond_func_sam rho_scaling", 1, marks=pytest.mark.full),
  ],
)
def test_methods_agree_on_one_and_eight_devices(tiny_config, method, micro):
  c = tiny_config
  c.batch_size, c.grad_accumulation_steps = 16, micro
  method, _, key = method.partition(" ")
  c.opt.update(method=method, rho=0.3, every=2)
  c.opt.update(
    {k: v for k, v in dict(ascent_fraction=0.5, rho_scaling="layer").items() if k == key}
  )
  (a, one), (b, eight) = steps(c, 3, devices=1), steps(c, 3, devices=8)
  names = {"train/loss", "train/loss_perturbed", "opt/eps_norm", "opt/grad_norm"} & set(one[0])
  for name in names:
    np.testing.assert_allclose([h[name] for h in eight], [h[name] for h in one], rtol=2e-4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), a.params, b.params)


def test_stacking_the_layers_changes_no_method(tiny_config):
  """Of those whose direction looks at each parameter by itself."""
  c = tiny_config
  c.opt.update(method="asam", rho=0.5)
  losses = []
  for c.model.scan_layers in (False, True):
    train_step = make_step(c)
    state = train_step.init(0)
    if not losses:
      same = jax.device_get(state.params)
      layers = [same.pop(f"layer_{i}") for i in range(c.model.N)]
      same[STACKED] = jax.tree.map(lambda *x: np.stack(x), *layers)
    else:
      state = state.replace(params=jax.device_put(same, train_step.state_shardings.params))
    step = train_step.trace().lower().compile()
    losses.append(step(state, next(batches(c, train_step.mesh, 1)))[1]["train/loss_perturbed"])
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_metrics_of_a_perturbed_step(tiny_config):
  c = tiny_config
  c.opt.update(method="precond_func_sam", rho=0.3)
  _, history = steps(c, 1)
  m = history[0]
  count = sum(x.size for x in jax.tree.leaves(make_step(c).abstract_params))
  np.testing.assert_allclose(m["opt/eps_norm"], 0.3, rtol=1e-5)
  np.testing.assert_allclose(m["opt/eps_rms"], 0.3 / count**0.5, rtol=1e-5)
  shares = [v for name, v in m.items() if name.startswith("eps_share/")]
  np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-5)


def test_how_much_of_eps_survives_a_bf16_second_pass(tiny_config):
  c = tiny_config
  c.opt.update(method="precond_func_sam", perturbed_dtype="bfloat16")
  train_step = make_step(c)
  params = jax.tree.map(np.asarray, train_step.init(0).params)

  def cosine(rho):
    c.opt.rho = rho
    return float(steps(c, 1)[1][0]["opt/eps_cosine"])

  size = sum(x.size for x in jax.tree.leaves(params)) ** 0.5
  assert cosine(1e-1 * size) > 0.99
  assert 0.05 < cosine(1e-5 * size) < 0.9  # most weights do not move, some jump
  c.opt.perturbed_dtype = "float32"
  assert "opt/eps_cosine" not in steps(c, 1)[1][0]


def test_saved_and_evaluated_parameters_are_the_unperturbed_ones(tiny_config):
  """With no step to take, a step leaves the parameters where they were, however large eps is."""
  c = tiny_config
  c.opt.update(method="precond_func_sam", rho=5.0, weight_decay=0.0)
  c.opt.update(peak_learning_rate=0.0, init_learning_rate=0.0, final_learning_rate=0.0)
  start = jax.device_get(make_step(c).init(0).params)
  state, history = steps(c, 2)
  assert history[0]["opt/eps_norm"] > 4.9
  jax.tree.map(np.testing.assert_array_equal, state.params, start)


@pytest.mark.parametrize("method", ["adamw", "sam", "precond_func_sam"])
def test_no_buffer_of_all_logits_in_the_compiled_step(tiny_config, method):
  c = tiny_config
  c.opt.method, c.head.residual, vocabulary = method, "recompute", 1009
  mesh = sharding.make_mesh(1, 1, devices=jax.devices()[:1])

  def largest(chunk):
    c.head.chunk = chunk
    text = TrainStep(c, vocabulary, mesh).trace().lower().compile().as_text()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return max(math.prod(map(int, s.split(","))) for s in shapes)

  all_logits = c.batch_size * c.model.L * vocabulary
  assert largest(0) >= all_logits  # the check sees one where there is one
  assert largest(4) < all_logits
