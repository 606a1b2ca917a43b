"""SentencePiece models as tokenizer.json: the same ids, or a refusal."""

import io

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto

from nanosam.data import tokenizer_json
from nanosam.data.embedded import build_embedded
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import MODEL_TYPES, Tokenizer, train_tokenizer
from nanosam.system.errors import UserError

PIECE = proto.ModelProto.SentencePiece


@pytest.fixture(scope="module")
def documents(cache):
  """Two hundred of the embedded corpus; 512 is the vocabulary of the tiny runs."""
  store = StoreReader(build_embedded(cache, 512))
  split = store.split("train")
  lengths = split.documents()[:200, 0]
  tokens, found = split.read(0, int(lengths.sum())), []
  for length in lengths:
    found.append(store.tokenizer.decode(tokens[:length].tolist())[:4000])
    tokens = tokens[length:]
  return found


@pytest.fixture(scope="module", params=MODEL_TYPES)
def tokenizer(request, documents):
  return train_tokenizer(documents[:100], 600 if request.param != "char" else 370, request.param)


def loaded(tokenizer):
  """As transformers load it: through its file."""
  found = tokenizers.Tokenizer.from_str(tokenizer_json.convert(tokenizer).to_str())
  found.encode_special_tokens = True
  return found


def encoder(converted):
  return lambda text: converted.encode(text, add_special_tokens=False).ids


def test_ids_and_texts_of_a_hundred_documents(tokenizer, documents):
  converted = loaded(tokenizer)
  assert converted.get_vocab_size() == tokenizer.vocab_size
  texts = [*documents[100:], *tokenizer_json.PROBES]
  assert len(texts) > 100
  ties = tokenizer_json.check(tokenizer, encoder(converted), texts, "it")
  kind = proto.ModelProto.FromString(tokenizer.model_bytes).trainer_spec.model_type
  assert ties <= (5 if kind == proto.TrainerSpec.UNIGRAM else 0)
  for text in texts:
    assert converted.decode(tokenizer.encode(text)) == text


def test_a_text_begins_with_bos(tokenizer):
  converted = loaded(tokenizer)
  assert converted.encode("Returns x").ids == [tokenizer.bos_id, *tokenizer.encode("Returns x")]
  assert tokenizer_json.special_tokens(tokenizer) == {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
  }
  for name, token in tokenizer_json.special_tokens(tokenizer).items():
    expected = getattr(tokenizer, name.replace("token", "id"), 3)
    assert converted.token_to_id(token) == expected


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_model_that_normalises(documents, byte_fallback):
  """As SentencePiece trains by default, like the reference's: NFKC, a space before the text."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(documents[:100]),
    model_writer=model,
    vocab_size=600,
    pad_id=0,
    eos_id=1,
    bos_id=2,
    unk_id=3,
    byte_fallback=byte_fallback,
    user_defined_symbols=["\u2581<extra_id_0>"],
    character_coverage=0.99,  # "<" may be unknown
    max_sentence_length=1 << 16,
    minloglevel=2,
  )
  tokenizer = Tokenizer(model.getvalue())
  texts = [
    *documents[100:],
    *tokenizer_json.PROBES,
    "a <extra_id_0> b",
    "\ufb01ne \uff11  ",
    "\t \n",
  ]
  tokenizer_json.check(tokenizer, encoder(loaded(tokenizer)), texts, "it")


def changed(tokenizer, change):
  model = proto.ModelProto.FromString(tokenizer.model_bytes)
  change(model)
  return Tokenizer(model.SerializeToString())


@pytest.mark.parametrize(
  "change, reason",
  [
    (lambda m: setattr(m.trainer_spec, "model_type", proto.TrainerSpec.WORD), "word model"),
    (lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True), "ends of words"),
    (lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False), "plain spaces"),
    (lambda m: setattr(m.pieces[-1], "type", PIECE.USER_DEFINED), "BPE model with user-defined"),
  ],
)
def test_refusals(documents, change, reason):
  bpe = train_tokenizer(documents[:20], 400, "bpe")
  with pytest.raises(UserError, match=f"cannot hold that tokenizer: .*{reason}"):
    tokenizer_json.convert(changed(bpe, change), "that tokenizer")


def test_other_ids_are_refused(tokenizer):
  right = encoder(loaded(tokenizer))("Return")
  with pytest.raises(UserError, match=r"cannot hold it: in '\w+' it gives the ids \[2\], not \["):
    tokenizer_json.check(tokenizer, lambda _: [*right[:-1], 2], ["Return"], "it")
  with pytest.raises(UserError, match=r"it gives the ids \[\], not \[\d+\]"):
    tokenizer_json.check(tokenizer, lambda _: right[:-1], ["Return"], "it")


def test_equally_likely_segmentations(documents):
  """9|99 and 99|9: SentencePiece chooses by rounding the sum of all that stands before."""
  unigram = train_tokenizer(documents[:20], 400, "unigram")
  model = proto.ModelProto.FromString(unigram.model_bytes)
  a, e = (next(i for i, p in enumerate(model.pieces) if p.piece == c) for c in "ae")
  assert tokenizer_json._near_tie(model, [a, e, a], [e, a, a])
  assert not tokenizer_json._near_tie(model, [a, e, a], [e, a])
  backwards = unigram.encode("x y z")[::-1]  # exactly as likely, but another text
  with pytest.raises(UserError, match="cannot hold it"):
    tokenizer_json.check(unigram, lambda _: backwards, ["x y z"], "it")
