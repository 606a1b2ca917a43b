"""A small vision Transformer on small images, by the same trainer and methods.

python -m nanosam.train --config=configs/vit.py[:method=sam,source=images:DIR]

The default source is scikit-learn's digits: pip install -e '.[vision]', and nothing to download.
600 steps take about half a minute on one CPU core with AdamW, twice that with a second pass. Expect
an accuracy of 97 % and an eval loss of 0.10.

`source=images:DIR` reads DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg, of 32 x 32 pixels unless
`image_size` says otherwise. On 20,000 images of CIFAR-10, 2500 steps take about two minutes;
expect an eval loss of 1.355 and an accuracy of 52 % (three seeds: 1.353 to 1.357, 51.6 to 52.7 %).
Smaller patches and a wider model give more.

The taus (diagnostics.every) are measured on half as many images as a step has. By timings of one of
each, 40 measurements add about 5 % to the steps of a run on CIFAR, 17 % with compiling. `classes=2`
merges the classes by their number modulo 2, and `head_scale=0` starts the head at zero.
"""

from nanosam import config

HEAD_WIDTH = 16
SIZES = {"digits": (8, 2, 600)}  # image, patch, steps
OTHER_SIZES = (32, 8, 2500)


def get_config(arg=None):
  args = config.arguments(
    arg,
    method="adamw",
    source="digits",
    image_size=0,
    patch_size=0,
    steps=0,
    width=64,
    depth=3,
    batch_size=64,
    classes=0,
    head_scale=1.0,
  )
  image_size, patch_size, steps = SIZES.get(args["source"], OTHER_SIZES)
  steps = args["steps"] or steps
  c = config.default(method=args["method"])
  c.workdir = f"runs/vit-{args['method']}"
  c.model.update(kind="vit", L=1, N=args["depth"], D=args["width"], H=args["width"] // HEAD_WIDTH)
  c.model.image_size = args["image_size"] or image_size
  c.model.patch_size = args["patch_size"] or patch_size
  c.model.head_scale = args["head_scale"]
  c.model.dtype = "float32"  # CPUs have no fast bf16
  c.batch_size = args["batch_size"]
  c.data.source, c.data.classes, c.data.repeat = args["source"], args["classes"], True
  c.opt.num_train_steps, c.opt.warmup_steps = steps, steps // 10
  c.opt.peak_learning_rate = 2e-3
  c.diagnostics.batch_size = max(1, c.batch_size // 2)
  c.eval_every_steps = max(1, steps // 10)
  c.eval_steps, c.eval_batch_size = 16, 256
  c.log_every_steps = max(1, steps // 20)
  c.checkpoint_every_steps = max(1, steps // 4)
  c.max_to_keep = 1
  c.tensorboard = False
  c.wandb.mode = "disabled"
  return c
