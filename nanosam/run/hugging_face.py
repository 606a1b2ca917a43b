"""A trained model as GPT-2, in the files that Hugging Face's transformers load.

Our model is GPT-2 without biases: these become zeros. Weights stay in fp32, as they were trained.
They go from the checkpoint to the file matrix by matrix, so that memory holds no second model.
"""

import contextlib
import gc
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from nanosam import __version__
from nanosam.data import tokenizer_json
from nanosam.data.sources import TextSource, text_of
from nanosam.data.tokenizer import Tokenizer
from nanosam.model import sharding
from nanosam.model.classifier import model_config
from nanosam.model.transformer import Params, norm
from nanosam.run.restore import Opened
from nanosam.run.safetensors_file import read_shapes, write_safetensors
from nanosam.run.step import TrainState, TrainStep
from nanosam.system.errors import UsageError, UserError
from nanosam.system.files import PARTIAL, disk_errors, lock_file, write_atomically, write_json
from nanosam.system.remote import is_remote

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG)
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu"}  # ours is the tanh form of gelu
PACKAGES = ("safetensors", "tokenizers", "transformers")
# To compare the tokenizers on: how many documents, among how many tokens, how much of each.
_DOCUMENTS, _TOKENS, _CHARACTERS = 100, 1 << 20, 20_000

# GPT-2's name in a layer: ours, put side by side if there are several.
_MATRICES = {
  "ln_1": ("norm1/scale",),
  "attn.c_attn": ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"),
  "attn.c_proj": ("attention/out/kernel",),
  "ln_2": ("norm2/scale",),
  "mlp.c_fc": ("mlp/up/kernel",),
  "mlp.c_proj": ("mlp/down/kernel",),
}


class Tensor(NamedTuple):
  """One of GPT-2's, and what it is made of."""

  name: str
  shape: tuple[int, ...]
  leaves: tuple[str, ...] = ()  # paths of our parameters; none: zeros
  layer: int | None = None  # of the leaves, if they are stacked


def check_installed() -> None:
  if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
    raise UserError(f"the export needs {', '.join(missing)}: pip install -e '.[hf]'")


def target_folder(out: str) -> pathlib.Path:
  """`out`, if it can be written without touching what is there."""
  if is_remote(out):
    raise UsageError(f"--out={out} is remote: export to a local folder, then copy it")
  target = pathlib.Path(os.path.abspath(out))
  if target.is_symlink() or (
    target.exists() and not (target.is_dir() and not any(target.iterdir()))
  ):
    raise UsageError(f"{target} is there already: remove it, or choose another --out")
  return target


@contextlib.contextmanager
def whole_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder to write to, which becomes `target` once all is written."""
  partial = target.with_name(target.name + PARTIAL)
  with disk_errors(target):
    partial.mkdir(parents=True, exist_ok=True)  # an export that was killed may have left it
    try:
      lock = lock_file(partial)
    except BlockingIOError:
      raise UsageError(f"another process is exporting to {target}: wait for it") from None
    try:
      yield partial
      partial.rename(target)
    except BaseException:
      for name in FILES:
        for path in (partial / name, partial / (name + PARTIAL)):
          path.unlink(missing_ok=True)
      with contextlib.suppress(OSError):
        partial.rmdir()
      raise
    finally:
      os.close(lock)


def write_gpt2(run: Opened, folder: pathlib.Path) -> str:
  """Writes all files; returns what there is to say about the tokenizer."""
  tokenizer = _text(run).tokenizer
  write_json(folder / CONFIG, gpt2_config(run, tokenizer))
  write_tokenizer(tokenizer, run.config.model.L, folder)
  said = check_tokenizer(run, folder)  # before the weights, which take longer
  write_weights(run, folder / WEIGHTS)
  return said


def _text(run: Opened) -> TextSource:
  return text_of(run.source, run.config.data.source)


def gpt2_config(run: Opened, tokenizer: Tokenizer) -> dict[str, Any]:
  c = run.config
  m, made = c.model, {"version": __version__, "method": c.opt.method, "step": run.step}
  return {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "dtype": "float32",
    "vocab_size": tokenizer.vocab_size,
    "n_positions": m.L,
    "n_embd": m.D,
    "n_layer": m.N,
    "n_head": m.H,
    "n_inner": m.F,
    "activation_function": ACTIVATIONS[m.activation],
    "layer_norm_epsilon": norm(model_config(c, tokenizer.vocab_size), "any").epsilon,
    "tie_word_embeddings": m.tied,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": tokenizer.eos_id,
    "pad_token_id": tokenizer.pad_id,
    "nanosam": {**made, "weights": run.weights},
  }


def gpt2_tensors(params: Params, N: int) -> list[Tensor]:
  """All of a model with these parameters, in an order that reads every parameter once."""
  shapes = {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}
  stacked = sharding.STACKED in params
  tensors = [
    Tensor("transformer.wte.weight", shapes["embed"], ("embed",)),
    Tensor("transformer.wpe.weight", shapes["pos_embed"], ("pos_embed",)),
    Tensor("transformer.ln_f.weight", shapes["out_norm/scale"], ("out_norm/scale",)),
    Tensor("transformer.ln_f.bias", shapes["out_norm/scale"]),
  ]
  if "unembed" in params:
    tensors.append(Tensor("lm_head.weight", shapes["unembed"], ("unembed",)))
  for theirs, ours in _MATRICES.items():
    for i in range(N):
      leaves = tuple(f"{sharding.STACKED if stacked else f'layer_{i}'}/{name}" for name in ours)
      *rows, columns = shapes[leaves[0]][1:] if stacked else shapes[leaves[0]]
      columns *= len(leaves)
      name = f"transformer.h.{i}.{theirs}"
      tensors.append(Tensor(f"{name}.weight", (*rows, columns), leaves, i if stacked else None))
  biases = [
    Tensor(t.name.replace(".weight", ".bias"), t.shape[-1:]) for t in tensors if ".h." in t.name
  ]
  return tensors + biases


def write_weights(run: Opened, path: pathlib.Path) -> None:
  mesh = sharding.make_mesh(data=1, fsdp=1, devices=jax.local_devices()[:1])
  V = _text(run).tokenizer.vocab_size
  state = TrainStep(run.config, V, mesh).abstract_state
  tensors = gpt2_tensors(state.params, run.config.model.N)
  shapes = {t.name: t.shape for t in tensors}
  write_safetensors(path, shapes, _read(run, state, tensors))
  if read_shapes(path) != shapes:
    raise UserError(f"{path} does not read back as written: check the disk")


def _read(run: Opened, state: TrainState, tensors: list[Tensor]) -> Iterator[np.ndarray]:
  """The tensors' values. In memory: the parameters that one is made of, and one layer of them."""
  leaf_of = flatten_dict(state.params, sep="/")
  for leaves, group in itertools.groupby(tensors, key=lambda t: t.leaves):
    found = []
    if leaves:
      some = unflatten_dict({name: leaf_of[name] for name in leaves}, sep="/")
      flat = flatten_dict(run.read(state, some, on_host=True), sep="/")
      found = [flat.pop(name) for name in leaves]
    for tensor in group:
      yield _value(tensor, found)
    del found  # before the next ones are read
    gc.collect()  # orbax may leave a cycle that holds an array


def _value(tensor: Tensor, parameters: list[np.ndarray]) -> np.ndarray:
  if not parameters:
    return np.zeros(tensor.shape, np.float32)
  of_layer = [x if tensor.layer is None else x[tensor.layer] for x in parameters]
  return of_layer[0] if len(of_layer) == 1 else np.concatenate(of_layer, axis=-1)


def write_tokenizer(tokenizer: Tokenizer, L: int, folder: pathlib.Path) -> None:
  converted = tokenizer_json.convert(tokenizer)
  write_atomically(folder / TOKENIZER, converted.to_str(pretty=True).encode())
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **tokenizer_json.special_tokens(tokenizer),
    "add_bos_token": True,
    "split_special_tokens": True,  # "<s>" in a text is text, as in training
    "clean_up_tokenization_spaces": False,
    "model_max_length": L,
  }
  write_json(folder / TOKENIZER_CONFIG, settings)


def check_tokenizer(run: Opened, folder: pathlib.Path) -> str:
  """Loads what was written as a user would, and compares ids on documents of the run."""
  from transformers import AutoTokenizer

  tokenizer, loaded = _text(run).tokenizer, AutoTokenizer.from_pretrained(folder)
  texts = documents(run)
  ties = tokenizer_json.check(
    tokenizer,
    lambda text: loaded(text, add_special_tokens=False, verbose=False)["input_ids"],
    [*texts, *tokenizer_json.PROBES],
    "the run's tokenizer",
  )
  said = f"the same token ids on {len(texts)} validation documents"
  return said + (f", but for equally likely ones in {ties}" if ties else "")


def documents(run: Opened) -> list[str]:
  """The first of the validation split, as text."""
  tokenizer, L = _text(run).tokenizer, run.config.model.L
  found = run.source.validation(L=L, rows=-(-_TOKENS // L), mask_documents=False)
  tokens = found.batch.inputs.reshape(-1)
  starts = np.flatnonzero(tokens == tokenizer.bos_id)[: _DOCUMENTS + 1]
  parts = np.split(tokens, starts)[1:][:_DOCUMENTS]
  return [tokenizer.decode(part.tolist())[:_CHARACTERS] for part in parts]
