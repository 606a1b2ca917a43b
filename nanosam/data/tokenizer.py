"""SentencePiece models, loaded or trained, with the special ids that packing needs."""

import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
from etils import epath

from nanosam.system.errors import UsageError, UserError

MODEL_TYPES = ("unigram", "bpe", "char")

# SentencePiece's trainer skips longer lines, so they are split.
_MAX_LINE_BYTES = 1 << 16
# Encoding takes about 20 bytes of memory per byte of text, so long texts are encoded in parts.
_PART_CHARS = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
  """The type of the ids in a token store."""
  return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
  """A SentencePiece model with pad, bos and eos."""

  def __init__(self, model_bytes: bytes, name: str = "the tokenizer"):
    self.model_bytes = model_bytes
    self.sha256 = hashlib.sha256(model_bytes).hexdigest()
    try:
      if not model_bytes:
        raise ValueError("empty")
      self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    except (RuntimeError, ValueError) as e:
      raise UserError(f"{name} is not a SentencePiece model; pass a .model file") from e
    self.vocab_size: int = self._model.vocab_size()
    self.pad_id: int = self._model.pad_id()
    self.bos_id: int = self._model.bos_id()
    self.eos_id: int = self._model.eos_id()
    missing = [n for n in ("pad", "bos", "eos") if getattr(self, f"{n}_id") < 0]
    if missing:
      raise UsageError(
        f"{name} has no {', '.join(missing)} token, which packing needs; "
        "use a SentencePiece model trained with pad_id, bos_id and eos_id"
      )

  def __reduce__(self):  # the processor cannot be pickled
    return Tokenizer, (self.model_bytes,)

  @classmethod
  def load(cls, path: epath.PathLike) -> "Tokenizer":
    try:
      model_bytes = epath.Path(path).read_bytes()
    except OSError as e:
      raise UserError(f"cannot read the tokenizer {path}: {e.strerror or e}") from e
    return cls(model_bytes, name=str(path))

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone, without bos and eos."""
    return self.encode_array(text).tolist()

  def encode_array(self, text: str) -> np.ndarray:
    """The same, in the type of the token store."""
    if len(text) <= _PART_CHARS:
      return self._encode(text)
    parts = _split(text, _PART_CHARS)
    encoded = [self._encode(next(parts))]
    for part in parts:
      encoded.append(self._encode(part.removeprefix(" ") if self._adds_a_space else part))
    return np.concatenate(encoded)

  def _encode(self, text: str) -> np.ndarray:
    return self._model.encode(text, return_type="numpy").astype(token_dtype(self.vocab_size))

  @functools.cached_property
  def _adds_a_space(self) -> bool:
    """Whether the model adds a space before a text; parts must then not begin with one."""
    a_b, a, b = (self._model.encode(text) for text in ("a b", "a", " b"))
    return a_b != a + b

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    return self._model.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    return self._model.decode([int(i) for i in ids])


def _split(text: str, size: int) -> Iterator[str]:
  """Parts of at most `size` characters, each beginning at a single space if possible."""
  start = 0
  while len(text) - start > size:
    stop = start + size
    spaces = list(re.finditer(r"(?<=\S) (?=\S)", text[stop - min(size, 4096) // 2 : stop]))
    if spaces:
      stop -= min(size, 4096) // 2 - spaces[-1].start()
    yield text[start:stop]
    start = stop
  yield text[start:]


class VocabularySizeError(UsageError):
  """This text cannot have a vocabulary of that size, but perhaps one of `least` or of `most`."""

  def __init__(self, message: str, least: int = 0, most: int = 0):
    super().__init__(message)
    self.least, self.most = least, most

  def __reduce__(self):  # to another process
    return VocabularySizeError, (str(self), self.least, self.most)


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, model_type: str = "bpe", quiet: bool = True
) -> Tokenizer:
  """Trains a vocabulary on the lines of `texts`; deterministic.

  Nothing is normalised: spaces and indentation become pieces, and whatever the vocabulary lacks
  (such as newlines) falls back to bytes, so decode(encode(text)) == text. The one exception is
  U+2581, SentencePiece's own symbol for a space.
  """
  lines = (
    part
    for text in texts
    for line in text.split("\n")
    if line and not line.isspace()
    for part in _split(line, _MAX_LINE_BYTES // 4)  # a character takes at most four bytes
  )
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=lines,
      model_writer=model,
      model_type=model_type,
      vocab_size=vocab_size,
      pad_id=0,
      eos_id=1,
      bos_id=2,
      unk_id=3,
      byte_fallback=True,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      max_sentence_length=_MAX_LINE_BYTES,
      minloglevel=2 if quiet else 0,
    )
  except RuntimeError as e:
    raise _size_error(f"cannot train a tokenizer of vocab_size={vocab_size}: ", str(e)) from e
  return Tokenizer(model.getvalue())


def _size_error(what: str, message: str) -> UsageError:
  """The cause of an error of SentencePiece's trainer, in plain words."""
  if "sentences_.empty()" in message:
    return UsageError(f"{what}there is no text")
  if found := re.search(r"too high .* value <= (\d+)", message):
    most = int(found[1])
    return VocabularySizeError(f"{what}this text supports at most {most}", most=most)
  if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
    least = int(found[1])
    plain = f"{what}its characters and the byte pieces alone need {least}"
    return VocabularySizeError(plain, least=least)
  return UsageError(what + message.strip())
