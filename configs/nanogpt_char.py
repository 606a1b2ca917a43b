"""nanoGPT's character model for CPUs, to compare trainers: its README says "loss is ~1.88".

head -c 1003854 input.txt > train.txt; tail -c +1003855 input.txt > validation.txt
python -m nanosam.data.prepare --input train.txt --validation validation.txt --output=data/chars \
  --model_type=char --vocab_size=324
python -m nanosam.train --config=configs/nanogpt_char.py

input.txt is tiny Shakespeare. A few minutes on one CPU core; expect an eval loss of about 1.82
(docs/oracles.md: three seeds, and every difference from nanoGPT).
"""

from nanosam import config


def get_config(arg=None):
  args = config.arguments(arg, method="adamw", source="tokens:data/chars")
  c = config.default(method=args["method"])
  c.workdir = f"runs/nanogpt-char-{args['method']}"
  c.model.update(D=128, H=4, N=4, L=64, dtype="float32")
  c.batch_size = 12
  c.data.source, c.data.repeat = args["source"], True
  c.opt.num_train_steps, c.opt.warmup_steps = 2000, 100
  c.opt.peak_learning_rate, c.opt.init_learning_rate, c.opt.b2, c.opt.eps = 1e-3, 0.0, 0.99, 1e-8
  c.opt.clip_by_global_norm = 1.0
  c.opt.weight_decay_params = "kernel|embed"
  c.eval_every_steps, c.eval_steps, c.eval_batch_size = 250, 28, 64  # all of the validation text
  c.log_every_steps, c.checkpoint_every_steps = 100, 1000
  c.tensorboard = False
  c.wandb.mode = "disabled"
  return c
