"""The paper's Chinchilla runs: 20 tokens per parameter (Tables 3, 4, 6).

python -m nanosam.train --config=configs/chinchilla.py:size=117.9M,method=sam,count=total

With AdamW, in hours of one TPU v5e chip at 40 % of its peak, and the eval loss that the paper has:
  23.9M 0.8 h, 3.69   42.5M 2.4 h, 3.45   117.9M 13 h, 3.12   1208M 930 h, 2.63
Methods with a second pass take twice as long; precond_func_sam gains 0.02 to 0.06 in the paper.
These have not been run with this code yet.

The paper does not say which parameters count. At 42.5M its fixed-length and Chinchilla losses
nearly coincide, which fits 20 x all parameters (about 10,300 steps) and not 20 x those outside the
embeddings (about 6,500): so `count=total` is the default.
"""

from nanosam import config

TOKENS_PER_PARAMETER = 20


def get_config(arg=None):
  args = config.arguments(arg, size="23.9M", method="adamw", count="total")
  c = config.paper(size=args["size"], method=args["method"])
  c.workdir = f"runs/chinchilla-{args['size']}-{args['method']}"
  counts = config.parameter_counts(c, config.PAPER_VOCABULARY)
  tokens = TOKENS_PER_PARAMETER * config.lookup("count", args["count"], counts)
  c.opt.num_train_steps = round(tokens / (c.batch_size * c.model.L))
  c.opt.warmup_steps = min(c.opt.warmup_steps, c.opt.num_train_steps // 5)  # only matters at 2M
  return c
