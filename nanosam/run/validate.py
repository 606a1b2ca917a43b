"""Checks of a config before any device is used."""

import math
import re

import ml_collections

from nanosam.config import flat, lookup
from nanosam.data.batch import EVAL_ROWS
from nanosam.model.classifier import NETWORKS
from nanosam.model.transformer import ACTIVATIONS, ATTENTIONS
from nanosam.model.vision import POOLINGS
from nanosam.optim import methods, schedules
from nanosam.optim.base import AVERAGES, BASES, parse_block_rates
from nanosam.optim.direction import RHO_SCALINGS, VARIANTS
from nanosam.run import own_method
from nanosam.run.log import WANDB_MODES
from nanosam.run.profiling import parse_steps
from nanosam.system.errors import UsageError, need

CHOICES = {
  "model.kind": NETWORKS,
  "model.pooling": POOLINGS,
  "model.activation": ACTIVATIONS,
  "model.attention": ATTENTIONS,
  "model.dtype": ("float32", "bfloat16"),
  "head.residual": ("store", "recompute", "auto"),
  "opt.method": methods.METHODS,
  "opt.base": BASES,
  "opt.average": AVERAGES,
  "opt.decay_type": schedules.DECAY_TYPES,
  "opt.rho_schedule": schedules.RHO_SCHEDULES,
  "opt.rho_scaling": RHO_SCALINGS,
  "opt.angle_form": ("exact", "short"),
  "opt.precond_variant": VARIANTS,
  "opt.perturbed_dtype": ("float32", "bfloat16"),
  "guard.policy": ("abort", "skip"),
  "guard.perturbed": ("abort", "skip", "plain"),
  "wandb.mode": WANDB_MODES,
  "eval_rows": EVAL_ROWS,
}
AT_LEAST_ONE = """
  model.D model.H model.L model.N model.F model.image_size model.patch_size batch_size
  grad_accumulation_steps opt.num_train_steps eval_every_steps eval_steps eval_batch_size
  opt.every diagnostics.batch_size log_every_steps checkpoint_every_steps max_to_keep
  cluster.timeout
""".split()
NOT_NEGATIVE = """
  seed data_seed head.chunk opt.rho opt.rho_warmup_steps opt.look_alpha opt.rho_max
  opt.perturb_group opt.asam_eta opt.eps
  opt.peak_learning_rate opt.init_learning_rate opt.final_learning_rate opt.warmup_steps
  opt.weight_decay opt.clip_by_global_norm guard.max_skips guard.spike
  model.head_scale data.classes data.workers data.prefetch diagnostics.every cluster.num_processes
""".split()
BELOW_ONE = ("opt.b1", "opt.b2", "opt.wsd_decay_fraction", "opt.average_decay", "opt.ae_decay")
REGEXES = ("opt.weight_decay_params", "opt.perturb_params")


def validate(c: ml_collections.ConfigDict) -> None:
  """Raises a UsageError for the first setting that cannot work, and says what would.

  Makes a method in a file of the user's known, and records its hash in the config.
  """
  own_method.adopt(c)
  values = flat(c)
  need(c.workdir, "no workdir: set --config.workdir=DIR")
  for key, known in CHOICES.items():
    lookup(key, values[key], dict.fromkeys(known))
  for key, value in values.items():
    if isinstance(value, float):
      need(math.isfinite(value), f"{key}={value} must be finite")
  for keys, low in ((AT_LEAST_ONE, 1), (NOT_NEGATIVE, 0)):
    for key in keys:
      need(values[key] >= low, f"{key}={values[key]} must be at least {low}")
  need(c.seed < 2**32, f"seed={c.seed} must be less than 2**32: JAX uses no more of it")
  for key in BELOW_ONE:
    need(0 <= values[key] < 1, f"{key}={values[key]} must lie in [0, 1)")
  for key in REGEXES:
    try:
      re.compile(values[key])
    except re.error as e:
      raise UsageError(f"{key}={values[key]} is not a regex: {e}") from e
  parse_steps(c.profile_steps)
  m, o = c.model, c.opt
  need(
    m.D % m.H == 0,
    f"model.D={m.D} is not divisible by model.H={m.H} heads: {_multiples(m.D, m.H)} would be",
  )
  need(
    c.batch_size % c.grad_accumulation_steps == 0,
    f"batch_size={c.batch_size} is not divisible by "
    f"grad_accumulation_steps={c.grad_accumulation_steps}: "
    f"{_multiples(c.batch_size, c.grad_accumulation_steps)} would be",
  )
  need(
    o.warmup_steps <= o.num_train_steps,
    f"opt.warmup_steps={o.warmup_steps} is longer than opt.num_train_steps={o.num_train_steps}: "
    f"set it to {o.num_train_steps // 10}, a tenth",
  )
  _method(c)
  if m.kind == "vit":
    need(
      m.image_size % m.patch_size == 0,
      f"model.image_size={m.image_size} is not divisible by model.patch_size={m.patch_size}",
    )
    need(m.L == 1, f"model.L={m.L}: an image has one label, so set model.L=1")
    need(not c.data.mask_documents, "data.mask_documents is for text: images have no documents")
    need(c.eval_rows == "packed", "eval_rows=documents is for text: images have no documents")


def check_source(c: ml_collections.ConfigDict, image_size: int) -> None:
  """Whether the data is what the model takes; `image_size` is that of the source, 0 for text."""
  name, size = c.data.source, image_size
  if c.model.kind == "vit":
    need(size > 0, f"{name} is text: with model.kind=vit set data.source to digits or images:DIR")
    need(
      size == c.model.image_size,
      f"the images of {name} are {size} x {size} pixels: set model.image_size={size}, and "
      "model.patch_size to a divisor of it",
    )
  else:
    need(size == 0, f"{name} holds images: set model.kind=vit, or start from configs/vit.py")


def _multiples(value: int, of: int) -> str:
  """The nearest multiples, below and above."""
  low = value // of * of
  return f"{low} or {low + of}" if low else str(of)


def _method(c: ml_collections.ConfigDict) -> None:
  o = c.opt
  try:
    found = methods.resolve(o)
  except methods.MethodError as e:
    raise UsageError(str(e)) from e
  direction, path, _ = found
  need(0 < o.average_fraction <= 1, f"opt.average_fraction={o.average_fraction} must lie in (0, 1]")
  for name in ("top_share", "weight_share", "data_share"):
    need(0 < o[name] <= 1, f"opt.{name}={o[name]} must lie in (0, 1]")
  if o.block_rates:
    try:
      parse_block_rates(o.block_rates)
    except (ValueError, re.error) as e:
      raise UsageError(f"opt.block_rates={o.block_rates}: {e}") from e
  need(0 <= o.phi <= math.pi / 2, f"opt.phi={o.phi} must lie in [0, pi/2]")
  need(
    o.method != "momentum_precond_func_sam" or o.precond_variant == "post",
    f"opt.precond_variant={o.precond_variant} is for precond_sam and precond_func_sam: {o.method} "
    "has one form",
  )
  need(abs(o.momentum_sign) == 1, f"opt.momentum_sign={o.momentum_sign} must be 1 or -1")
  if o.rho_schedule == "piecewise":
    try:
      schedules.parse_pieces(o.rho_pieces)
    except ValueError as e:
      raise UsageError(f"opt.rho_pieces={o.rho_pieces}: {e}") from e
  _parts_of_the_batch(c, found)
  if c.model.attention == "cudnn":
    need(
      "float32" not in (c.model.dtype, o.perturbed_dtype),
      f"model.attention=cudnn needs 16-bit types: model.dtype={c.model.dtype}, "
      f"opt.perturbed_dtype={o.perturbed_dtype}",
    )
    need(not path.derivative, f"{o.method} differentiates twice: set model.attention=xla")
  need(
    c.guard.perturbed != "plain" or direction is None or direction.needs_gradient,
    f"guard.perturbed=plain needs the gradient at theta, which {o.method} never computes",
  )


def _parts_of_the_batch(c: ml_collections.ConfigDict, found: methods.Row) -> None:
  """Whether groups, microbatches and what a method takes of a batch go together."""
  o = c.opt
  if found.direction and (parts := methods.ascent_parts(o)) > 1:
    micro = c.grad_accumulation_steps
    need(
      max(parts, micro) % min(parts, micro) == 0,
      f"opt.ascent_fraction=1/{parts} with grad_accumulation_steps={micro}: one of the two numbers "
      "must divide the other",
    )
    need(
      not o.perturb_group, "opt.ascent_fraction is for one perturbation: set opt.perturb_group=0"
    )
    need(
      c.guard.perturbed != "plain",
      "guard.perturbed=plain needs the gradient of the whole batch at theta, which "
      f"opt.ascent_fraction=1/{parts} never computes",
    )
  need(
    not found.path.selects or not o.perturb_group,
    f"{o.method} chooses from the whole batch: set opt.perturb_group=0",
  )
  if o.perturb_group:
    need(
      not found.when.remembers,
      f"opt.perturb_group has a perturbation for each group, and {o.method} remembers one: set "
      "opt.perturb_group=0",
    )
    need(
      c.grad_accumulation_steps == 1,
      "opt.perturb_group already goes through the batch group by group: set "
      "grad_accumulation_steps=1",
    )
    need(
      c.batch_size % o.perturb_group == 0,
      f"batch_size={c.batch_size} is not divisible by opt.perturb_group={o.perturb_group}",
    )


def check_devices(c: ml_collections.ConfigDict, shards: int) -> None:
  """What can only be checked once the number of devices is known."""
  ascent = 1 if methods.METHODS[c.opt.method].direction is None else methods.ascent_parts(c.opt)
  split = max(c.grad_accumulation_steps, ascent)
  need(
    c.batch_size % (split * shards) == 0 or ascent == 1,
    f"opt.ascent_fraction=1/{ascent} of batch_size={c.batch_size} leaves no whole sequence, or "
    f"unequal numbers, on {shards} devices: use a larger fraction, or batch_size="
    f"{_multiples(c.batch_size, split * shards)}",
  )
  if c.opt.method in methods.METHODS and methods.row(c.opt.method, c.opt).path.selects:
    chosen, of = round(c.opt.data_share * c.batch_size), shards * c.grad_accumulation_steps
    need(
      chosen and chosen % of == 0,
      f"opt.data_share={c.opt.data_share} of batch_size={c.batch_size} is {chosen} sequences, "
      f"which do not divide over {shards} devices and {c.grad_accumulation_steps} microbatches: "
      f"make it {_multiples(chosen, of)}",
    )
  micro = c.opt.perturb_group or c.batch_size // c.grad_accumulation_steps
  key = "opt.perturb_group" if c.opt.perturb_group else "batch_size"
  parts = 1 if c.opt.perturb_group else c.grad_accumulation_steps
  need(
    micro % shards == 0,
    f"a microbatch of {micro} rows (batch_size={c.batch_size}, grad_accumulation_steps="
    f"{c.grad_accumulation_steps}, opt.perturb_group={c.opt.perturb_group}) does not divide over "
    f"{shards} devices: make it a multiple of {shards}, with {key}="
    f"{_multiples(micro * parts, shards * parts)}",
  )
