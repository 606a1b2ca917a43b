"""Table 5 of arXiv 2502.02407: GELU and ReLU in the 2M model.

python launch/sweep.py --sweep=launch/sweeps/table5.py[:SEEDS] --out=DIR
"""

from nanosam.sweep import tuned

METHODS = ("adamw", "precond_sam", "precond_func_sam")


def runs(arg=None):
  seeds = int(arg or 1)
  return [
    run
    for activation in ("gelu", "relu")
    for run in tuned(
      "configs/fixed_length.py",
      METHODS,
      seeds=seeds,
      tag="table5",
      size="2M",
      activation=activation,
    )
  ]
