"""Table 4 of arXiv 2502.02407: the 23.9M runs of Table 3, whose sharpness is then measured with
`python -m nanosam.sharpness --workdir=DIR/RUN`. With the same --out they are the same runs.

python launch/sweep.py --sweep=launch/sweeps/table4.py[:SEEDS] --out=DIR
"""

from nanosam.study.sweep import tuned

METHODS = ("adamw", "sam", "precond_sam", "precond_func_sam")


def runs(arg=None):
  return tuned("configs/chinchilla.py", METHODS, seeds=int(arg or 1), tag="table4", size=["23.9M"])
