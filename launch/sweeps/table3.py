"""Table 3 of arXiv 2502.02407: 20 tokens a parameter at four sizes.

python launch/sweep.py --sweep=launch/sweeps/table3.py[:SEEDS] --out=DIR
"""

from nanosam.study.sweep import tuned

METHODS = ("adamw", "sam", "precond_sam", "precond_func_sam")
SIZES = ("23.9M", "42.5M", "117.9M", "1208M")


def runs(arg=None):
  return tuned("configs/chinchilla.py", METHODS, seeds=int(arg or 1), tag="table3", size=SIZES)
