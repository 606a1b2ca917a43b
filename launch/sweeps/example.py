"""An example sweep: SAM and PrecondFuncSAM at three values of rho, with AdamW as the baseline.

python launch/sweep.py --sweep=launch/sweeps/example.py[:STEPS] --out=runs/example
python -m nanosam.compare runs/example --tune=opt.rho

14 runs of width 32 on the embedded corpus; with the default of 500 steps each takes a few minutes
on two CPU cores. A sweep is any list of (config, overrides): copy this file and change it. For the
paper's own tables use scripts/reproduce.py.
"""

from nanosam.study.sweeps import product, together

METHODS = ["sam", "precond_func_sam"]
RHOS = [0.01, 0.03, 0.1]
SEEDS = [1, 2]


def runs(arg=None):
  config = f"configs/mini.py:steps={arg or 500}"
  # The same seeds for every method: `compare` pairs runs that share both.
  seeds = together({"seed": SEEDS, "data_seed": SEEDS})
  # AdamW has no rho, so it is listed once, outside the grid.
  baseline = [(f"{config},method=adamw", overrides) for overrides in seeds]
  grid = product({"opt.rho": RHOS}, seeds)
  return baseline + [(f"{config},method={m}", overrides) for m in METHODS for overrides in grid]
