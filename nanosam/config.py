"""Every key and its default; reading, checking and comparing configs.

A config file defines `get_config(arg)`, starts from `default()` and returns it. Nothing that
changes a result has a default anywhere else, and no key can be added by accident: it is locked.
"""

import ast
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_collections

from nanosam.system import python_file
from nanosam.system.errors import UsageError, nearest

# name: layers, heads, width. Named by non-embedding parameters as in arXiv 2502.02407; `mini` is
# ours and trains in minutes on two CPU cores.
SIZES: dict[str, tuple[int, int, int]] = {
  "mini": (3, 4, 64),
  "2M": (3, 4, 256),
  "23.9M": (6, 9, 576),
  "42.5M": (6, 12, 768),
  "117.9M": (6, 20, 1280),
  "1208M": (6, 64, 4096),
}


# A default that follows another key is an expression of its reference (`ref + ""`): the bare
# reference would be the same cell, and setting either key would set both.
def default(size: str = "2M", method: str = "adamw") -> ml_collections.ConfigDict:
  """The reference's settings (Nanodo's where the paper is silent)."""
  c = ml_collections.ConfigDict()
  c.workdir = ""  # everything a run writes; the same command again resumes it
  c.init_from = ""  # WORKDIR[@STEP] to take the initial parameters from; STEP: latest, best, number
  c.init_optimizer = False  # with init_from: its moments too
  c.seed = 42  # of the initial parameters
  c.data_seed = 0  # of the data's order; with the step it determines a batch, on any machine
  c.batch_size = 256  # sequences per step, over all devices and microbatches
  c.grad_accumulation_steps = 1  # microbatches per step: saves memory, changes nothing else

  c.model = _model(size)
  c.head = ml_collections.ConfigDict()
  c.head.chunk = 32  # sequence positions whose logits exist at a time; 0 = all (dense)
  c.head.residual = "auto"  # store | recompute | auto (store if small), for the functional methods
  c.opt = _opt(method, c.model)
  c.guard = _guard()
  c.data = _data()

  c.mesh = ml_collections.ConfigDict()
  c.mesh.data = 1  # copies of the model; -1 = all remaining devices
  c.mesh.fsdp = -1  # devices that share one copy

  c.diagnostics = ml_collections.ConfigDict()
  c.diagnostics.every = 0  # steps between measurements of tau and critical sharpness; 0 = off
  c.diagnostics.batch_size = c.get_ref("batch_size") * 1  # sequences from the validation split

  # A run on several machines. TPU pods, Slurm and launch/local.py set these.
  c.cluster = ml_collections.ConfigDict()
  c.cluster.coordinator = ""  # HOST:PORT of process 0; "" = detect, or a single process
  c.cluster.num_processes = 0  # 0 = detect; 1 = only this one
  c.cluster.process_id = -1  # -1 = detect
  c.cluster.timeout = 300  # seconds to wait for all processes at the start

  c.eval_every_steps = 500
  c.eval_steps = 32  # eval_steps x eval_batch_size sequences: a fixed set
  c.eval_batch_size = 64
  # packed: whole documents end to end, like training; documents: the first L tokens of one document
  # a row, as the reference evaluates (its last position predicts nothing).
  c.eval_rows = "packed"
  c.log_every_steps = 10

  c.checkpoint = True
  c.checkpoint_every_steps = 1000
  c.max_to_keep = 2  # newest checkpoints; the best by eval loss is kept in addition
  c.allow_changed_keys = False  # resume even if keys that change the result differ

  c.profile_steps = ""  # "10-15" = trace these steps for TensorBoard or Perfetto
  c.tensorboard = True
  c.wandb = _wandb(c.opt)
  c.deterministic = False  # reproducible GPU kernels; CPUs and TPUs need nothing
  return c.lock()


def _model(size: str) -> ml_collections.ConfigDict:
  m = ml_collections.ConfigDict()
  m.N, m.H, m.D = lookup("size", size, SIZES)  # layers, heads, width
  m.kind = "decoder"  # decoder (text) | vit (images)
  m.L = 512  # context length; 1 for images, which have one label
  m.F = m.get_ref("D") * 4  # inner width of the MLP
  m.activation = "gelu"  # gelu | relu
  m.tied = True  # the embedding is also the unembedding
  m.dtype = "bfloat16"  # of matrix products; parameters, softmax and residual stream stay fp32
  m.remat = False  # recompute each layer in the backward pass
  m.scan_layers = False  # compile one layer instead of N
  m.attention = "plain"  # plain | xla | cudnn | auto (cudnn where it works, else xla)
  m.image_size = 32  # vit: pixels of a side
  m.patch_size = 4  # vit: likewise
  m.pooling = "mean"  # vit: mean (of the patches) | token (a class token)
  m.head_scale = 1.0  # vit: of the head's initial weights; 0 = all zero, as is usual in vision
  return m


def _opt(method: str, model: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  o = ml_collections.ConfigDict()
  o.method = method  # a row of METHODS in nanosam/optim/methods.py, or path/to/file.py:NAME
  o.method_sha256 = ""  # of that file; set by the program
  o.base = "adamw"  # adamw | sgd | lion | adafactor | muon
  # Learning rate and weight decay.
  o.num_train_steps = 10_000  # updates
  o.peak_learning_rate = 1e-3
  o.init_learning_rate = o.get_ref("peak_learning_rate") * 0.1
  o.final_learning_rate = o.get_ref("peak_learning_rate") * 0.1
  o.warmup_steps = 1000
  o.decay_type = "cosine"  # cosine | linear | rsqrt | constant | wsd
  o.wsd_decay_fraction = 0.2  # wsd: the share of all steps that decay
  o.weight_decay = 0.1  # decoupled, times the learning rate
  o.weight_decay_params = ".*"  # regex of parameter paths; "kernel|embed" leaves out the norms
  o.block_rates = ""  # factors of the rate by path, "embed:10,mlp:6" | published (2502.19002)
  # The base optimizer.
  o.b1 = 0.9  # first moment (adamw, lion, muon's Adam part), momentum (sgd)
  o.b2 = 0.98  # second moment (adamw, muon's Adam part), lion's slow average
  o.eps = 1e-9  # in Adam's denominator
  o.clip_by_global_norm = 0.0  # of the final gradient; 0 = off
  o.average = "none"  # averaged weights beside the raw ones: none | ema | tail (of the last steps)
  o.average_decay = 0.999  # ema: what the average keeps of itself at each step
  o.average_fraction = 0.1  # tail: the share of all steps that it is the mean of
  # The perturbation.
  o.rho = 0.05  # its radius (adamw has none)
  o.rho_schedule = (
    "constant"  # constant | warmup | lr (proportional to it) | late | mid | piecewise
  )
  o.rho_warmup_steps = o.get_ref("warmup_steps") * 1  # warmup: steps from 0 to rho
  o.rho_pieces = "0.8:1"  # piecewise: fraction of training:factor,...; 0 before the first
  o.phi = math.pi / 4  # angle_sam: 0 = functional path, pi/2 = logit path
  o.angle_form = "exact"  # exact | short (one backward pass fewer, equal to second order in rho)
  o.precond_variant = "post"  # post (rho is the length of eps) | paper (Eq. 12 to the letter)
  o.precond_power = 1.0  # of Adam's denominator
  o.asam_eta = 0.01  # asam: added to the size of each weight
  o.rho_scaling = "global"  # global | layer (relative to each layer's natural size, after mu-P^2)
  o.ascent_fraction = 1.0  # of the batch, that g is computed on for its direction: 1, 1/2, 1/3, ...
  o.every = 5  # every_*, look_*: steps from one second pass to the next
  o.look_alpha = 0.7  # look_*: length of the reused part, relative to g; 0 = as it was measured
  o.ae_start = 1.0  # ae_*: threshold at the start, in standard deviations of |g|^2 over its mean
  o.ae_end = -1.0  # ae_*: at the end
  o.ae_decay = 0.9  # ae_*: of the running mean and variance
  o.rho_max = 1.0  # le_*: the most that eps may be long
  o.weight_share = 0.5  # esam: of the weights, chosen at random, that are perturbed
  o.data_share = 0.5  # esam: of the sequences, those whose loss rises most, for the second pass
  o.top_share = 0.5  # top_sam: of the arrays, those with the longest gradients are perturbed
  o.momentum_sign = 1.0  # momentum_*: 1 = towards higher loss; -1 = as published for Momentum-SAM
  o.perturb_params = ".*"  # regex of the parameter paths that are perturbed
  o.perturb_group = 0  # m-SAM: one perturbation per group of this many sequences; 0 = one for all
  o.perturbed_dtype = model.get_ref("dtype") + ""  # of matrix products in the second pass
  return o


def _guard() -> ml_collections.ConfigDict:
  """Against losses and gradients that are not finite."""
  g = ml_collections.ConfigDict()
  g.policy = "abort"  # abort | skip (biases comparisons)
  g.perturbed = "abort"  # if only the second pass is bad: abort | skip | plain (use its gradient)
  g.max_skips = 10  # abort after this many
  g.spike = 6.0  # warn if the loss rises by this many standard deviations; 0 = never
  return g


def _data() -> ml_collections.ConfigDict:
  d = ml_collections.ConfigDict()
  # Text: embedded | tokens:DIR (prepared) | text:FILE_OR_FOLDER (prepared on first use) | tfds:NAME
  # or tfds:DIR (on the fly); images: digits | images:DIR (DIR/train/CLASS/*.jpg) | tfds:...
  d.source = "embedded"
  d.vocab_size = 4096  # of the tokenizer trained on embedded; on text:... at most, if it is small
  d.data_dir = ""  # where tfds:NAME is stored
  d.tokenizer = ""  # SentencePiece model for text: and tfds:; "" = its own, or the one beside it
  d.text_field = "text"  # of text: and tfds: records
  d.border = "file"  # what ends a document in .txt of text:...: file | line | blank_line | a marker
  d.classes = 0  # of images: merged into so many (their number modulo it); 0 = as they are
  d.weights = ""  # file of nanosam.data.difficulty: how often an epoch shows each document
  d.repeat = False  # start another epoch when the data ends, instead of failing
  d.mask_documents = False  # neither attend nor predict across document borders
  d.workers = 0  # processes that read ahead; 0 = threads in this one
  d.prefetch = 4  # batches to read ahead
  d.cache_dir = ""  # for the embedded corpus and copies of remote data; "" = ~/.cache/nanosam
  return d


def _wandb(opt: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  w = ml_collections.ConfigDict()
  w.mode = "auto"  # auto (online if there is an account) | online | offline | disabled
  w.project = "nanosam"
  w.entity = ""
  w.name = ""  # "" = the workdir's name
  w.group = opt.get_ref("method") + ""
  w.tags = ""  # comma-separated
  return w


# Keys that earlier versions had, with their defaults. Workdirs that carry them still open.
REMOVED = {
  "opt.muon_beta": 0.95,
  "opt.muon_rms": 0.2,
  "opt.adafactor_decay": 0.8,
  "opt.adafactor_clip": 1.0,
  "opt.log_gradient_cosine": False,
  "compilation_cache": "",
  "wandb.job_type": "train",
}


def current(stored: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """A stored config without the keys that have been removed since.

  A removed key that was not at its default, and changed the result, stays: it tells runs apart.
  """
  kept: dict[str, Any] = {}
  for name, value in stored.items():
    key = prefix + name
    if isinstance(value, Mapping):
      kept[name] = current(value, f"{key}.")
    elif key not in REMOVED or (value != REMOVED[key] and not FREE_KEYS.fullmatch(key)):
      kept[name] = value
  return kept


PAPER_VOCABULARY = 32_101  # pieces of the reference's cc_all.32000.100extra


def paper(size: str, method: str) -> ml_collections.ConfigDict:
  """What all of the paper's runs share, with what each size needs to fit its devices."""
  c = default(size=size, method=method)
  c.data.source = "tokens:data/c4"
  c.eval_rows = "documents"  # so that losses compare with the published ones
  c.model.remat = size in ("42.5M", "117.9M", "1208M")
  if size == "1208M":
    c.model.scan_layers = True  # one compiled layer instead of six
    if method in ("sam", "precond_sam"):
      c.opt.rho_schedule = "warmup"  # the paper's remedy for their NaNs at this size
  return c


def parameter_counts(c: ml_collections.ConfigDict, vocab_size: int) -> dict[str, int]:
  """Of the model of a config, without building it."""
  m = c.model
  layers = m.N * (4 * m.D**2 + 2 * m.D * m.F)
  embeddings = (1 if m.tied else 2) * vocab_size * m.D + m.L * m.D
  norms = (2 * m.N + 1) * m.D
  return {"total": layers + embeddings + norms, "non_embedding": layers}


# Keys that may differ between a run and its continuation: they do not change the result.
FREE_KEYS = re.compile(
  r"workdir|log_every_steps|checkpoint.*|max_to_keep|allow_changed_keys|compilation_cache|"
  r"deterministic|profile_steps|tensorboard|wandb\..*|mesh\..*|cluster\..*|diagnostics\..*|"
  r"grad_accumulation_steps|model\.remat|data\.(workers|prefetch|cache_dir|data_dir)"
)


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
  if name not in table:
    raise UsageError(f"unknown {kind} '{name}': {nearest(name, table)}")
  return table[name]


def arguments(text: str | None, **defaults: Any) -> dict[str, Any]:
  """Parses the `k=v,k=v` after the colon of --config=FILE.py:k=v; types follow the defaults."""
  values = dict(defaults)
  for item in filter(None, (text or "").split(",")):
    key, equals, value = item.partition("=")
    if key not in defaults:
      raise UsageError(f"unknown config argument '{key}': {nearest(key, defaults)}")
    if not equals:
      raise UsageError(f"config argument '{item}': write {key}=VALUE")
    values[key] = _parse(key, value, defaults[key])
  return values


def microbatches(batch_size: int, micro: int) -> int:
  """How many parts of `micro` sequences a batch has."""
  if micro < 1 or batch_size % micro:
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    near = sorted(divisors, key=lambda n: abs(n - micro))[:2]
    raise UsageError(
      f"micro={micro} does not divide a batch of {batch_size}: {min(near)} or {max(near)} would"
    )
  return batch_size // micro


def _parse(key: str, text: str, default: Any) -> Any:
  """A value of the default's type from the command line's text."""
  if isinstance(default, str):
    return text
  kind = type(default).__name__
  try:
    value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
  except (ValueError, SyntaxError):
    value = text
  if isinstance(default, float) and type(value) is int:
    value = float(value)
  if type(value) is not type(default):
    raise UsageError(f"{key}={text}: expected {'an' if kind[0] in 'aeiou' else 'a'} {kind}")
  return value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{'opt.rho': 0.1, ...}: one entry per value, in order."""
  items: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      items |= flat(value, f"{prefix}{key}.")
    else:
      items[prefix + key] = value
  return items


def override(config: ml_collections.ConfigDict, key: str, text: str) -> None:
  values = flat(config)
  if key not in values:
    raise UsageError(f"unknown config key '{key}': {nearest(key, values)}")
  *path, last = key.split(".")
  for part in path:
    config = config[part]
  config[last] = _parse(key, text, values[key])


def load(spec: str) -> ml_collections.ConfigDict:
  """The config of `FILE.py[:arguments]`."""
  file, _, arg = spec.partition(":")
  shipped = pathlib.Path(__file__).parent / file  # configs/... in a wheel, where no clone is
  if file.startswith("configs/") and shipped.is_file() and not pathlib.Path(file).exists():
    file = str(shipped)

  def checked(config: Any) -> ml_collections.ConfigDict:
    if not isinstance(config, ml_collections.ConfigDict):
      raise UsageError(
        f"config file {file}: get_config returned {type(config).__name__}, not a config"
      )
    return config

  return python_file.call("config", file, "get_config", arg, checked)


def from_command_line(argv: list[str]) -> ml_collections.ConfigDict:
  """--config=FILE.py[:k=v,...] and any number of --config.KEY=VALUE."""
  spec, overrides = None, []
  words = iter(argv[1:])
  for word in words:
    flag, equals, value = word.partition("=")
    if not re.fullmatch(r"--?config(\..+)?", flag):
      raise UsageError(f"unknown argument '{word}': {_key_meant(flag, value)}")
    if not equals:
      value = next(words, "")
    key = flag.lstrip("-").removeprefix("config").removeprefix(".")
    if key:
      overrides.append((key, value))
    else:
      spec = value
  if not spec:
    raise UsageError("no config: say --config=configs/FILE.py")
  config = load(spec)
  for key, value in overrides:
    override(config, key, value)
  return config


def _key_meant(flag: str, value: str) -> str:
  """For --workdir=X or --rho=0.1."""
  name = flag.lstrip("-")
  for key in flat(default()):
    if key == name or key.endswith(f".{name}"):
      return f"did you mean --config.{key}={value or 'VALUE'}?"
  return "usage: --config=FILE.py[:k=v,...] [--config.KEY=VALUE ...]"


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Keys that change the result and differ, as `key: old -> new`; those younger than the old config
  had their default."""
  old, new = {**flat(default()), **flat(current(old))}, flat(new)
  return [
    f"{key}: {old.get(key)} -> {new.get(key)}"
    for key in sorted({*old, *new})
    if not FREE_KEYS.fullmatch(key) and old.get(key) != new.get(key)
  ]


def to_dict(c: ml_collections.ConfigDict) -> dict[str, Any]:
  """Plain and fully resolved, as it reads back from JSON."""
  return json.loads(json.dumps(c.to_dict()))
