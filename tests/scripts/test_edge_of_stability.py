"""Training comes to rest where theory says: methods, moments and products with H, from outside."""

import pytest
from helpers.scripts import load_script

script = load_script("scripts/edge_of_stability.py")


@pytest.mark.full
@pytest.mark.parametrize("case", script.CASES, ids=lambda c: f"{c.name}-{c.lr:g}-{c.rho:g}")
def test_sharpness_settles_at_the_edge(case):
  found = script.run(case, script.digits(500), steps=3000, measurements=40)
  assert 0.95 < found["ratio"] < 1.07
  assert 0.9 < found["from"] and found["to"] < 1.15


def test_sams_edge_tends_to_that_of_gradient_descent():
  sam, gd = script.Case("sam", None, 0.1, 1e-9), script.Case("gd", None, 0.1)
  assert script.edge(gd, 1.0) == 20
  assert script.edge(sam, 1.0) == pytest.approx(20, rel=1e-5)
