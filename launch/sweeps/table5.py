"""Table 5 of arXiv 2502.02407: GELU and ReLU in the 2M model.

python launch/sweep.py --sweep=launch/sweeps/table5.py[:SEEDS] --out=DIR
"""

from nanosam.study.sweep import tuned

METHODS = ("adamw", "precond_sam", "precond_func_sam")
KINDS = {"size": ["2M"], "activation": ["gelu", "relu"]}


def runs(arg=None):
  return tuned("configs/fixed_length.py", METHODS, seeds=int(arg or 1), tag="table5", **KINDS)
