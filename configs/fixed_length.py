"""The paper's fixed-length runs: 10,000 steps of 256 x 512 tokens at every size (Tables 1, 2, 5).

python -m nanosam.train --config=configs/fixed_length.py:size=23.9M,method=precond_func_sam

With AdamW, in hours of one TPU v5e chip at 40 % of its peak, and the eval loss that the paper has:
  2M 0.3 h, 3.90   23.9M 1.3 h, 3.57   42.5M 2.3 h, 3.45   117.9M 5.4 h, 3.28   1208M 46 h, 3.08
Methods with a second pass take twice as long; precond_func_sam gains 0.03 to 0.04 in the paper.
These have not been run with this code yet.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(arg, size="23.9M", method="adamw", activation="gelu")
  c = config.paper(size=args["size"], method=args["method"])
  c.workdir = f"runs/fixed_length-{args['size']}-{args['method']}"
  c.model.activation = args["activation"]
  c.opt.num_train_steps = 10_000
  return c
