"""The reference recipe on one GPU: bf16, microbatches, rematerialization, a fused attention.

python -m nanosam.train --config=configs/single_gpu.py:size=42.5M,method=precond_func_sam,micro=32

Reads data/c4. `micro` is the number of sequences on the device at a time: lower it if memory runs
out; the result does not depend on it. `deterministic=True` asks XLA for reproducible kernels,
which are a little slower. Nobody has run it on a GPU yet; by its FLOPs (results/plan.md), 42.5M
with AdamW takes about an hour and a half on an A100 at 40 % of its peak, with precond_func_sam
twice that. The paper's eval losses at 42.5M: AdamW 3.45, PrecondFuncSAM 3.41.
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
