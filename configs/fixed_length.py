"""The paper's fixed-length runs: 10,000 steps of 256 x 512 tokens at every size (Tables 1, 2, 5).

python -m nanosam.train --config=configs/fixed_length.py:size=23.9M,method=precond_func_sam

Reads data/c4 (README.md, "C4 and other text"). results/plan.md lists the hours of every size and
method on TPU v5e chips; nobody has run it there yet. The paper's eval losses at 23.9M: AdamW
3.57, SAM 3.59, PrecondSAM 3.55, PrecondFuncSAM 3.53.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(arg, size="23.9M", method="adamw", activation="gelu")
  c = config.paper(size=args["size"], method=args["method"])
  c.workdir = f"runs/fixed_length-{args['size']}-{args['method']}"
  c.model.activation = args["activation"]
  c.opt.num_train_steps = 10_000
  return c
