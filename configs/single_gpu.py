"""The reference recipe on one GPU: bf16, microbatches, recomputation, fused attention.

python -m nanosam.train --config=configs/single_gpu.py:size=42.5M,method=sam,micro=32

Any size and method. `micro` is the number of sequences on the device at a time; the result does not
depend on it. `attention=auto` is cuDNN's kernel where it works, else XLA's. `deterministic=True`
asks XLA for reproducible kernels, which are a little slower.
10,000 steps with AdamW at 42.5M are 6.5e17 FLOPs: 1.5 hours of an A100 at 40 % of its peak. Expect
the eval losses of configs/fixed_length.py. This config has not been run on a GPU yet.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(
    arg, size="42.5M", method="adamw", micro=32, attention="auto", deterministic=False
  )
  c = config.default(size=args["size"], method=args["method"])
  c.workdir = f"runs/single_gpu-{args['size']}-{args['method']}"
  c.grad_accumulation_steps = config.microbatches(c.batch_size, args["micro"])
  c.model.dtype = "bfloat16"
  c.model.remat = True
  c.model.attention = args["attention"]
  c.data.source = "tokens:data/c4"
  c.deterministic = args["deterministic"]
  return c
