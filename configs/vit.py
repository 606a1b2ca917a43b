"""A small vision Transformer on small images, by the same trainer and methods.

python -m nanosam.train --config=configs/vit.py[:method=sam,source=images:DIR,image_size=32]

The default source is scikit-learn's digits: pip install -e '.[vision]', and nothing to download.
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(
    arg,
    method="adamw",
    source="digits",
    image_size=8,
    patch_size=2,
    pooling="mean",
    width=64,
    depth=3,
    batch_size=64,
    steps=600,
  )
  c = config.default(method=args["method"])
  c.workdir = f"runs/vit-{args['method']}"
  c.model.update(kind="vit", L=1, N=args["depth"], D=args["width"], H=args["width"] // 16)
  c.model.update(
    image_size=args["image_size"], patch_size=args["patch_size"], pooling=args["pooling"]
  )
  c.model.dtype = "float32"  # CPUs have no fast bf16
  c.batch_size = args["batch_size"]
  c.data.source = args["source"]
  c.data.repeat = True
  c.opt.num_train_steps = args["steps"]
  c.opt.warmup_steps = args["steps"] // 10
  c.opt.peak_learning_rate = 2e-3
  c.eval_every_steps = max(1, args["steps"] // 10)
  c.eval_steps, c.eval_batch_size = 16, 256
  c.log_every_steps = max(1, args["steps"] // 20)
  c.checkpoint_every_steps = max(1, args["steps"] // 4)
  c.max_to_keep = 1
  c.tensorboard = False
  c.wandb.mode = "disabled"
  return c
