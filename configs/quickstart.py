"""A small model on the embedded corpus: nothing to download.

python -m nanosam.train --config=configs/quickstart.py[:method=sam]

600 steps, about two minutes on two CPU cores with AdamW. Expect an eval loss of about 5.04; it
depends on the versions of the packages whose documentation is the corpus.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(arg, size="mini", method="adamw")
  c = config.default(**args)
  c.workdir = f"runs/quickstart-{args['method']}"
  c.batch_size = 16
  c.model.L = 128
  c.model.dtype = "float32"  # CPUs have no fast bf16
  c.opt.num_train_steps = 600
  c.opt.warmup_steps = 60
  c.opt.peak_learning_rate = 4e-3
  c.eval_every_steps = 100
  c.eval_steps = 8
  c.checkpoint_every_steps = 200
  c.data.repeat = True
  return c
