"""The paper's Chinchilla runs: 20 tokens per parameter (Tables 3, 4, 6).

python -m nanosam.train --config=configs/chinchilla.py:size=117.9M,method=sam,count=total

Reads data/c4. `python scripts/reproduce.py table3 --scale=paper --out=DIR --dry_run --device=v5e`
prints the hours. The paper's eval losses at 117.9M: AdamW 3.12, SAM 3.13, PrecondSAM 3.11,
PrecondFuncSAM 3.10.

The paper does not say which parameters count. At 42.5M its fixed-length and Chinchilla losses
nearly coincide, which fits 20 x all parameters (about 10,300 steps) and not 20 x those outside
the embeddings (about 6,500): so `count=total` is the default.
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
  c.opt.warmup_steps = min(c.opt.warmup_steps, c.opt.num_train_steps // 5)  # matters to 2M alone
  return c
