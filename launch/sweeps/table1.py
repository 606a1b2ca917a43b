"""Table 1 of arXiv 2502.02407: the 2M model for 10,000 steps, SAM and its functional and
preconditioned forms, at four values of rho each.

python launch/sweep.py --sweep=launch/sweeps/table1.py[:SEEDS] --out=DIR
"""

from nanosam.study.sweep import tuned

METHODS = ("adamw", "sam", "precond_sam", "func_sam", "precond_func_sam")


def runs(arg=None):
  return tuned("configs/fixed_length.py", METHODS, seeds=int(arg or 1), tag="table1", size=["2M"])
