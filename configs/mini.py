"""The paper's recipe in miniature, for two CPU cores: the same proportions at smaller sizes.

python -m nanosam.train --config=configs/mini.py:method=sam,width=32,source=tokens:data/wiki

500 steps at width 32 take 2 to 4 minutes with AdamW, twice that with a second pass. Expect an eval
loss of about 4.36 on Wikipedia (results/mini); on the embedded corpus it depends on your packages.

What is kept: depth 3, MLP 4 x width, tied embedding, AdamW with the reference's betas, linear
warmup over the first tenth (1000 of 10,000 there), cosine decay to a tenth of the peak, decoupled
weight decay, no clipping, a fixed number of steps for all methods, and roughly the tokens per
parameter: 55 here, 126 in the paper's fixed-length runs of size 2M (embeddings counted).
What is not, and why:
- width 32 (64 to confirm) and 1024 pieces, so that a run takes minutes and still trains the model
  for long enough;
- 8192 tokens per step rather than 131,072, but no fewer: in a pilot (one seed) precond_func_sam
  lost to AdamW at 2048 tokens per step and won at 16,384;
- peak learning rate 3.2e-2, the best of a grid: small models need larger ones;
- fp32, as CPUs have no fast bf16; length 128 to match;
- microbatches of four sequences, which fit in a core's cache; the result is the same;
- data that ends is repeated, in the same way for all methods (see the record `data/epoch`);
- the eval set has 1024 sequences, so that differences of a few thousandths can be seen.

`tokens_per_parameter` (20: Chinchilla) sets the steps from the number of all parameters, which
depends on the vocabulary: pass `vocab_size` if the source's is not 1024.
"""

from nanosam import config

DEPTH, HEAD_WIDTH, MICROBATCH = 3, 16, 4


def get_config(arg=None):
  args = config.arguments(
    arg,
    width=32,
    method="adamw",
    source="embedded",
    length=128,
    batch_size=64,
    steps=500,
    tokens_per_parameter=0.0,
    activation="gelu",
    dtype="float32",
    tied=True,
    vocab_size=1024,
  )
  c = config.default(method=args["method"])
  c.workdir = f"runs/mini-{args['width']}-{args['method']}"
  c.model.update(D=args["width"], H=args["width"] // HEAD_WIDTH, N=DEPTH, L=args["length"])
  c.model.activation, c.model.dtype, c.model.tied = args["activation"], args["dtype"], args["tied"]
  c.batch_size = args["batch_size"]
  c.grad_accumulation_steps = max(1, c.batch_size // MICROBATCH)
  c.data.source = args["source"]
  c.data.vocab_size = args["vocab_size"]  # of the embedded corpus; a store has its own
  c.data.repeat = True  # enough for one run may not be enough for twice the steps
  c.opt.num_train_steps = args["steps"]
  if args["tokens_per_parameter"]:
    tokens = args["tokens_per_parameter"] * config.parameter_counts(c, args["vocab_size"])["total"]
    c.opt.num_train_steps = max(1, round(tokens / (c.batch_size * c.model.L)))
  c.opt.warmup_steps = c.opt.num_train_steps // 10
  c.opt.peak_learning_rate = 3.2e-2
  c.eval_every_steps = max(1, c.opt.num_train_steps // 10)
  c.eval_steps, c.eval_batch_size = 16, 64
  c.log_every_steps = max(1, c.opt.num_train_steps // 20)
  c.checkpoint_every_steps = max(1, c.opt.num_train_steps // 4)
  c.max_to_keep = 1
  c.tensorboard = False
  c.wandb.mode = "disabled"
  return c
