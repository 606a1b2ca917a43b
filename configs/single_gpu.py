"""The reference recipe on one GPU: bf16, microbatches, recomputation, a fused attention.

Any size and method; `micro` is how many sequences are on the device at a time. The result does not
depend on it. `deterministic=True` asks XLA for reproducible kernels, which are a little slower.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(
    arg, size="42.5M", method="adamw", micro=32, attention="cudnn", deterministic=False
  )
  c = config.default(size=args["size"], method=args["method"])
  c.workdir = f"runs/single_gpu-{args['size']}-{args['method']}"
  c.grad_accumulation_steps = c.batch_size // args["micro"]
  c.model.dtype = "bfloat16"
  c.model.remat = True
  c.model.attention = args["attention"]
  c.data.source = "tokens:data/c4"
  c.deterministic = args["deterministic"]
  return c
