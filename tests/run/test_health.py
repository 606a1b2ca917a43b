"""Warnings about a perturbation that cannot do what it is for."""

from nanosam.run.health import PerturbationCheck

GOOD = {"opt/eps_norm": 0.1, "opt/eps_ratio": 1e-3, "opt/eps_cosine": 0.9}


def test_warned_once_of_each():
  check = PerturbationCheck()
  assert check.update(GOOD) == []
  (large,) = check.update({**GOOD, "opt/eps_ratio": 0.5})
  assert "0.5 times as long as the weights" in large and "lower opt.rho" in large
  (lost,) = check.update({**GOOD, "opt/eps_ratio": 0.5, "opt/eps_cosine": 0.2})
  assert "0.20" in lost and "opt.perturbed_dtype=float32" in lost
  assert check.update({**GOOD, "opt/eps_ratio": 0.5, "opt/eps_cosine": 0.2}) == []


def test_without_a_perturbation_there_is_nothing_to_say():
  check = PerturbationCheck()
  assert check.update({}) == []  # adamw
  assert check.update({"opt/eps_norm": 0.0, "opt/eps_ratio": 0.0, "opt/eps_cosine": 0.0}) == []
  assert check.update({"opt/eps_norm": 0.1, "opt/eps_ratio": 1e-3}) == []  # fp32 has no cosine


def test_a_run_far_away_says_so(commands, tmp_path):
  """It ends like any other, with a loss worse than guessing."""
  done = commands.train(
    tmp_path / "run", opt__method="sam", opt__rho=1e8, opt__num_train_steps=4, opt__warmup_steps=1
  )
  assert done.code == 0, done.err
  assert "times as long as the weights" in done.err
  assert "warning: the eval loss is above 6.24, which guessing has" in done.err
