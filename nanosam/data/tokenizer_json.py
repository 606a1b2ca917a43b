"""A SentencePiece model as the tokenizer.json of Hugging Face's `tokenizers`, with the same ids.

Built from the model's pieces, without a pre-tokenizer: like SentencePiece, it segments a text as a
whole. Pieces that text can never become in SentencePiece (<s>, <0x0A>) stay unreachable.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sentencepiece import sentencepiece_model_pb2

from nanosam.data.tokenizer import Tokenizer
from nanosam.system.errors import UserError

if TYPE_CHECKING:
  import tokenizers

Encode = Callable[[str], Sequence[int]]
proto: Any = sentencepiece_model_pb2  # its classes are made at run time: mypy sees none

SPACE = "\u2581"  # SentencePiece's symbol for one
_Piece = proto.ModelProto.SentencePiece
_REACHABLE = (_Piece.NORMAL, _Piece.USER_DEFINED)

# Beside real text: what a corpus may lack, and where conversions go wrong.
PROBES = (
  "",
  " ",
  "a",
  " leading, trailing ",
  "two  three   four    spaces",
  "lines\n\n\tand tabs\r\n",
  "<s> </s> <pad> <unk> <0x0A>",
  "naïve café, £5 - “quoted” … 3½ m²",
  "Ελληνικά, русский, עברית, 日本語と中文, 한국어",
  "emoji 🙂👍🏽",
)


def convert(tokenizer: Tokenizer, name: str = "this tokenizer") -> "tokenizers.Tokenizer":
  """Encoding a text begins with bos, as documents do in training, unless special tokens are off."""
  from tokenizers import AddedToken, Tokenizer, processors

  model = proto.ModelProto.FromString(tokenizer.model_bytes)
  if reason := _refusal(model):
    raise UserError(f"transformers cannot hold {name}: {reason}")
  pieces = [p.piece for p in model.pieces]
  converted = Tokenizer(_model(model))
  converted.normalizer = _normalizer(model.normalizer_spec)
  converted.pre_tokenizer = _pre_tokenizer(model)
  converted.decoder = _decoder(model.normalizer_spec)
  converted.add_special_tokens(
    [
      AddedToken(p.piece, special=True, normalized=False)
      for p in model.pieces
      if p.type in (_Piece.CONTROL, _Piece.UNKNOWN)
    ]
  )
  converted.encode_special_tokens = True  # "<s>" in a text is text
  bos = pieces[tokenizer.bos_id]
  converted.post_processor = processors.TemplateProcessing(
    single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.bos_id)]
  )
  return converted


def check(tokenizer: Tokenizer, encode: Encode, texts: Iterable[str], name: str) -> int:
  """Raises if `encode` does not give the tokenizer's ids; returns how many texts were near ties.

  A unigram model takes the likeliest segmentation. Two may be equally likely, and SentencePiece,
  which adds up a whole text in fp32, then decides by rounding. That cannot be repeated elsewhere.
  """
  model, ties = proto.ModelProto.FromString(tokenizer.model_bytes), 0
  for text in texts:
    ours, theirs = tokenizer.encode(text), list(encode(text))
    if ours != theirs:
      if not _near_tie(model, ours, theirs) or tokenizer.decode(ours) != tokenizer.decode(theirs):
        raise UserError(f"transformers cannot hold {name}: {_difference(tokenizer, ours, theirs)}")
      ties += 1
  return ties


def _near_tie(model: Any, ours: Sequence[int], theirs: Sequence[int]) -> bool:
  likelihoods = [sum(model.pieces[i].score for i in ids) for ids in (ours, theirs)]
  return model.trainer_spec.model_type == proto.TrainerSpec.UNIGRAM and math.isclose(
    *likelihoods, rel_tol=1e-5
  )


def _difference(tokenizer: Tokenizer, ours: Sequence[int], theirs: Sequence[int]) -> str:
  pairs = itertools.zip_longest(ours, theirs)
  at = next(i for i, (a, b) in enumerate(pairs) if a != b)
  around = tokenizer.decode(ours[max(at - 4, 0) : at + 4])
  return f"in {around!r} it gives the ids {theirs[at : at + 3]}, not {ours[at : at + 3]}"


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
  """{"bos_token": "<s>", ...}"""
  pieces = proto.ModelProto.FromString(tokenizer.model_bytes).pieces
  ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
  ids["unk"] = next(i for i, p in enumerate(pieces) if p.type == _Piece.UNKNOWN)
  return {f"{name}_token": pieces[i].piece for name, i in ids.items()}


def _refusal(model: Any) -> str:
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  kind = proto.TrainerSpec.ModelType.Name(trainer.model_type)
  if trainer.model_type == proto.TrainerSpec.WORD:
    return "it is a word model, and those need a splitter of their own"
  if trainer.treat_whitespace_as_suffix:
    return "it puts spaces at the ends of words (treat_whitespace_as_suffix)"
  if not normalizer.escape_whitespaces:
    return "it keeps plain spaces (escape_whitespaces=False)"
  if model.denormalizer_spec.precompiled_charsmap:
    return "it changes text when decoding (a denormalizer)"
  if trainer.model_type != proto.TrainerSpec.UNIGRAM and any(
    p.type in (_Piece.USER_DEFINED, _Piece.UNUSED) for p in model.pieces
  ):
    return f"it is a {kind} model with user-defined or unused pieces"
  return ""


def _model(model: Any) -> Any:
  from tokenizers import models

  trainer = model.trainer_spec
  unk = next(i for i, p in enumerate(model.pieces) if p.type == _Piece.UNKNOWN)
  if trainer.model_type == proto.TrainerSpec.UNIGRAM:
    vocab = list(zip((p.piece for p in model.pieces), _unigram_scores(model.pieces), strict=True))
    return models.Unigram(vocab, unk_id=unk, byte_fallback=trainer.byte_fallback)
  bpe = trainer.model_type == proto.TrainerSpec.BPE
  return models.BPE(
    vocab={p.piece: i for i, p in enumerate(model.pieces)},
    merges=list(_merges(model.pieces)) if bpe else [],
    unk_token=model.pieces[unk].piece,
    fuse_unk=True,
    byte_fallback=trainer.byte_fallback,
  )


def _unigram_scores(pieces: Any) -> Iterator[float]:
  """Log-probabilities; lower than any spelling for what text must not become."""
  normal = [p.score for p in pieces if p.type == _Piece.NORMAL]
  lowest, highest = min(normal), max(normal)
  hidden = min(lowest, -1.0) * (1 + max(len(p.piece) for p in pieces if p.type not in _REACHABLE))
  for p in pieces:
    if p.type == _Piece.USER_DEFINED:  # SentencePiece's rule, by which they always win
      yield len(p.piece.encode()) * highest - 0.1
    else:
      yield p.score if p.type == _Piece.NORMAL else hidden


def _merges(pieces: Any) -> Iterator[tuple[str, str]]:
  """Every pair that makes a piece, best piece first: SentencePiece merges any of them."""
  scores = {p.piece: p.score for p in pieces if p.type == _Piece.NORMAL}
  for piece in sorted(scores, key=lambda piece: -scores[piece]):
    for i in range(1, len(piece)):
      if piece[:i] in scores and piece[i:] in scores:
        yield piece[:i], piece[i:]


def _normalizer(spec: Any) -> Any:
  from tokenizers import Regex, normalizers

  steps: list[Any] = []
  if spec.precompiled_charsmap:
    steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
  if spec.remove_extra_whitespaces:
    steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
    steps.append(normalizers.Replace(Regex(" {2,}"), " "))
  if spec.add_dummy_prefix:
    steps.append(normalizers.Prepend(SPACE))
  return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(model: Any) -> Any:
  """Keeps a text from becoming <s> where "<" is unknown, which is less likely than any piece."""
  from tokenizers import Regex, pre_tokenizers

  if model.trainer_spec.model_type != proto.TrainerSpec.UNIGRAM:
    return None
  known = {p.piece for p in model.pieces if p.type in _REACHABLE}
  hidden = [p.piece for p in model.pieces if p.type not in _REACHABLE and p.piece[0] not in known]
  if not hidden:
    return None
  pattern = "|".join(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in hidden)
  return pre_tokenizers.Split(Regex(pattern), "isolated")


def _decoder(spec: Any) -> Any:
  from tokenizers import decoders

  steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if spec.add_dummy_prefix:
    steps.append(decoders.Strip(" ", left=1))
  return decoders.Sequence(steps)
