"""Sources of batches. Each host reads only its own rows of the global batch.

Of a token store or of images, a batch depends on (data_seed, step) alone, not on hosts, workers or
restarts. Text that is tokenised on the fly depends on the number of hosts too (tfds.py).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from etils import epath

from nanosam.data import images
from nanosam.data.batch import TOO_FEW_TOKENS, EvalSet, StreamOptions
from nanosam.data.embedded import build_embedded
from nanosam.data.packing import (
  HostBatches,
  TokenRows,
  Tokens,
  documents_that_fit,
  first_tokens,
  num_rows,
  pack_tokens,
)
from nanosam.data.store import MANIFEST, TOKENIZER, StoreReader, read_manifest
from nanosam.data.stream import StoreStream, Stream
from nanosam.data.tokenizer import Tokenizer
from nanosam.data.weights import Weights, passes, read_weights
from nanosam.system.errors import UsageError, UserError
from nanosam.system.remote import is_remote, local_copy, storage_errors

SETTINGS = ("vocab_size", "cache_dir", "data_dir", "tokenizer", "text_field", "border", "classes")


class Source(Protocol):
  """Tokenised text or images, with a training and a validation split."""

  fingerprint: str  # identifies these tokens or images
  coding: str  # identifies what the outputs stand for: the tokenizer, or the classes
  outputs: int  # pieces of the vocabulary, or classes
  image_size: int  # in pixels; 0 for text

  @property
  def weights(self) -> Weights | None:
    """Of the documents of the training split, if data.weights names them."""

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    """Raises a UserError if training would run out of data."""

  def train_stream(self, options: StreamOptions) -> Stream: ...

  def independent_rows(self, L: int) -> int:
    """Of the training split: images, or rows of text, but no more than there are documents."""
    ...

  def validation(
    self, *, L: int, rows: int, mask_documents: bool, eval_rows: str = "packed"
  ) -> EvalSet:
    """A fixed set of images, or of documents (packed: whole ones), in at most `rows` rows."""
    ...


class TextSource(Source, Protocol):
  tokenizer: Tokenizer
  train_tokens: int  # these three are estimates if text is tokenised on the fly
  train_documents: int
  train_bytes: int


def text_of(source: Source, name: str) -> TextSource:
  """For what can be done with text alone."""
  if source.image_size:
    raise UsageError(f"{name} holds images, and this command is for text")
  return cast(TextSource, source)


def open_source(
  source: str,
  *,
  vocab_size: int,
  cache_dir: str,
  data_dir: str = "",
  tokenizer: str = "",
  text_field: str = "text",
  border: str = "file",
  classes: int = 0,
) -> Source:
  """Opens a source by its name.

  embedded         the embedded corpus, with a vocabulary of `vocab_size` pieces
  tokens:DIR       a token store, which has its own vocabulary
  text:PLACE       a file, folder or pattern of text, prepared once: with a vocabulary of at most
                   `vocab_size` pieces, or with `tokenizer`
  tfds:NAME        a TFDS data set under `data_dir`, or tfds:DIR, tokenised on the fly with
                   `tokenizer` ("" = the one stored next to it); or one of images
  digits           scikit-learn's handwritten digits
  images:DIR       folders of images, DIR/train/CLASS/*.jpg|png

  Images have as many classes as `classes` says; 0 = as they are.
  A remote DIR (gs://...) is copied to `cache_dir` first.
  """
  kind, _, argument = source.partition(":")
  cache = Path(cache_dir) if cache_dir else default_cache_dir()
  if source == "embedded":
    store = StoreReader(build_embedded(cache, vocab_size))
    store.verify()  # small enough to check every byte each time
    return StoreSource(store)
  if kind == "tokens" and argument:
    return StoreSource(
      StoreReader(copy_store(argument, cache) if is_remote(argument) else argument)
    )
  if kind == "text" and argument:
    from nanosam.data.text import build_text  # only here: training needs none of it

    settings = {"tokenizer": tokenizer, "text_field": text_field, "border": border}
    store = StoreReader(build_text(argument, cache, vocab_size=vocab_size, **settings))
    store.verify()
    return StoreSource(store)
  if kind == "tfds" and argument:
    from nanosam.data import tfds  # slow to import

    directory = tfds.find(argument, data_dir)
    if tfds.holds_images(directory):
      return images.open_tfds(directory, cache, classes)
    return tfds.open_texts(directory, tokenizer=tokenizer, text_field=text_field, cache_dir=cache)
  if source == "digits":
    return images.open_digits(cache, classes)
  if kind == "images" and argument:
    return images.open_folder(argument, cache, classes)
  raise UsageError(
    f"unknown data source {source!r}; use 'embedded', 'tokens:DIR', 'text:FILE', 'tfds:NAME' or "
    "'tfds:DIR', or for images 'digits', 'images:DIR' or 'tfds:NAME'"
  )


def copy_store(uri: str, cache_dir: Path) -> Path:
  """A local copy of a token store, with every byte checked."""
  with storage_errors(uri):
    remote = epath.Path(uri)
    manifest = read_manifest(remote)
    shards = [s["name"] for split in manifest["splits"].values() for s in split if s["tokens"]]
    names = [f"{name}.{suffix}" for name in shards for suffix in ("tokens", "documents")]
    return local_copy(
      remote,
      [*names, TOKENIZER, MANIFEST],
      version=(remote / MANIFEST).read_bytes(),
      cache_dir=cache_dir,
      check=lambda copy: StoreReader(copy).verify(),
    )


def source_of(data: Any, source: str = "") -> Source:
  """Opens the source in a config's `data` section, or another one with the same settings (and
  without weights, which are those of one store)."""
  opened = open_source(source or data.source, **{key: data[key] for key in SETTINGS})
  if source or not data.weights:
    return opened
  if not isinstance(opened, StoreSource):
    raise UsageError(
      f"data.weights needs a token store, and {data.source} is none: make one of the text with "
      "python -m nanosam.data.prepare, and set data.source=tokens:DIR"
    )
  return StoreSource(opened.store, read_weights(data.weights))


def eval_set(source: Source, c: Any) -> EvalSet:
  """The sequences that a run with this config is evaluated on."""
  return source.validation(
    L=c.model.L,
    rows=c.eval_steps * c.eval_batch_size,
    mask_documents=c.data.mask_documents,
    eval_rows=c.eval_rows,
  )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """One state for the streams of all hosts; each of them can be restored from it."""
  merged = dict(states[0])
  if "positions" in merged:
    merged["positions"] = {k: v for state in states for k, v in state["positions"].items()}
  return merged


def default_cache_dir() -> Path:
  if directory := os.environ.get("NANOSAM_CACHE"):
    return Path(directory)
  return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanosam"


class StoreSource:
  """A TextSource that reads a token store."""

  image_size = 0

  def __init__(self, store: StoreReader, weights: Weights | None = None):
    self.store, self.weights = store, weights
    self.tokenizer = store.tokenizer
    self.coding, self.outputs = store.tokenizer.sha256, store.tokenizer.vocab_size
    self.fingerprint = store.fingerprint
    self._train = store.split("train")
    self._validation = store.split("validation")
    self._epoch: tuple[Tokens, ...] = (self._train,)
    if weights:
      self._epoch = passes(self._train, self.fingerprint, weights)
    self.train_tokens = sum(part.num_tokens for part in self._epoch)
    self.train_documents = sum(part.num_documents for part in self._epoch)
    self.train_bytes = sum(part.num_bytes for part in self._epoch)
    if self.train_tokens < 2:
      raise UserError(f"{store.directory} has no training tokens; prepare the data again")

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    most = sum(num_rows(part.num_tokens, L) for part in self._epoch) // batch_size
    if steps > most and not repeat:
      raise UserError(
        f"the training data has {self.train_tokens} tokens, enough for {most} steps of "
        f"{batch_size} x {L}, but {steps} steps ({steps * batch_size * L} tokens) were asked for; "
        + TOO_FEW_TOKENS
      )

  def train_stream(self, options: StreamOptions) -> StoreStream:
    rows = TokenRows(self._epoch, self.tokenizer, options.L, options.mask_documents)
    weights = self.weights.hash if self.weights else ""
    return StoreStream(HostBatches(rows, options), self.fingerprint, weights)

  def independent_rows(self, L: int) -> int:
    return min(num_rows(self._train.num_tokens, L), self._train.num_documents)

  def validation(
    self, *, L: int, rows: int, mask_documents: bool, eval_rows: str = "packed"
  ) -> EvalSet:
    table = self._validation.documents()
    if eval_rows == "documents":
      table = table[:rows]
      starts = table[:, 0].cumsum() - table[:, 0]
      lengths = np.minimum(table[:, 0], L)
      heads = [self._validation.read(s, s + n) for s, n in zip(starts, lengths, strict=True)]
      return first_tokens(heads, table, L=L, tokenizer=self.tokenizer)
    documents = documents_that_fit(table[:, 0], rows, L)
    num_tokens, num_bytes = (int(n) for n in table[:documents].sum(0))
    tokens = self._validation.read(0, num_tokens)
    batch = pack_tokens(tokens, L=L, tokenizer=self.tokenizer, mask_documents=mask_documents)
    return EvalSet(batch, num_bytes, documents)
