"""Table 2 of arXiv 2502.02407: 10,000 steps at four sizes.

python launch/sweep.py --sweep=launch/sweeps/table2.py[:SEEDS] --out=DIR
"""

from nanosam.study.sweep import tuned

METHODS = ("adamw", "sam", "precond_sam", "precond_func_sam")
SIZES = ("23.9M", "42.5M", "117.9M", "1208M")


def runs(arg=None):
  return tuned("configs/fixed_length.py", METHODS, seeds=int(arg or 1), tag="table2", size=SIZES)
