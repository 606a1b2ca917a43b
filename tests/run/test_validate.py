"""Settings of a method that cannot work are refused before anything runs."""

import pytest

from nanosam.run.validate import check_devices, validate
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
    (dict(method="look_sam", perturb_group=4), "opt.perturb_group=0"),
    (dict(method="every_sam", every=0), "opt.every=0 must be at least 1"),
    (dict(method="func_sam", ascent_fraction=0.0), "1, 1/2, 1/3"),
    (dict(method="func_sam", ascent_fraction=0.3), "1, 1/2, 1/3"),
    (dict(method="look_sam", ascent_fraction=0.5), "use sam, func_sam"),
    (dict(method="angle_sam", ascent_fraction=0.5), "use sam, func_sam"),
    (dict(method="momentum_sam", ascent_fraction=0.5), "computes no gradient"),
    (dict(method="top_sam", top_share=1.5), "opt.top_share"),
    (dict(method="ae_sam", ae_decay=1.0), "opt.ae_decay"),
    (dict(rho_scaling="layers"), "layer"),
    (dict(method="le_sam", rho_scaling="layer"), "rho_scaling=global"),
    (dict(method="esam", weight_share=0.0), "opt.weight_share"),
    (dict(method="esam", ascent_fraction=0.5), "use sam, func_sam"),
    (dict(block_rates="embed"), "regex:factor"),
    (dict(method="momentum_precond_func_sam", precond_variant="paper"), "has one form"),
  ],
)
def test_bad_method_settings(tiny_config, changes, words):
  tiny_config.opt.update(changes)
  with pytest.raises(UsageError, match=words):
    validate(tiny_config)


def test_a_part_of_the_batch_that_leaves_a_device_without_a_sequence(tiny_config):
  c = tiny_config
  c.opt.update(method="func_sam", ascent_fraction=0.25)
  validate(c)
  check_devices(c, shards=2)
  with pytest.raises(UsageError, match="larger fraction, or batch_size=16"):
    check_devices(c, shards=4)
  c.grad_accumulation_steps = 8
  check_devices(c, shards=1)
  c.opt.method = "adamw"
  c.grad_accumulation_steps = 1
  check_devices(c, shards=4)  # the setting means nothing to it
