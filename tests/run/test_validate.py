"""Settings of a method that cannot work are refused before anything runs."""

import pytest

from nanosam.run.validate import validate
from nanosam.system.errors import UsageError


@pytest.mark.parametrize(
  "method, base_name, words",
  [
    ("precond_sam", "sgd", "second moment"),
    ("precond_func_sam", "lion", "second moment"),
    ("momentum_sam", "muon", "first moment"),
  ],
)
def test_a_base_that_cannot_carry_the_method(tiny_config, method, base_name, words):
  tiny_config.opt.update(method=method, base=base_name)
  with pytest.raises(UsageError, match=words):
    validate(tiny_config)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(rho=-0.1), "opt.rho"),
    (dict(phi=2.0), "opt.phi"),
    (dict(method="precon_func_sam"), "precond_func_sam"),
    (dict(rho_schedule="piecewise", rho_pieces="0.8"), "fraction:factor"),
    (dict(perturb_group=3), "perturb_group"),
    (dict(method="momentum_precond_func_sam", precond_variant="paper"), "has one form"),
  ],
)
def test_bad_method_settings(tiny_config, changes, words):
  tiny_config.opt.update(changes)
  with pytest.raises(UsageError, match=words):
    validate(tiny_config)
