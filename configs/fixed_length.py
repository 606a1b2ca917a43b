"""The paper's fixed-length runs: 10,000 steps of 256 x 512 tokens at every size (Tables 1, 2, 5).

--config=configs/fixed_length.py:size=23.9M,method=precond_func_sam
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(arg, size="23.9M", method="adamw", activation="gelu")
  c = config.paper(size=args["size"], method=args["method"])
  c.workdir = f"runs/fixed_length-{args['size']}-{args['method']}"
  c.model.activation = args["activation"]
  c.opt.num_train_steps = 10_000
  return c
