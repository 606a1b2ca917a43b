"""Small token stores."""

from nanosam.data.store import StoreWriter
from nanosam.data.tokenizer import train_tokenizer


def write_store(path, train, validation, vocab_size=320):
  """A store of texts; `train` is a list of shards, each a list of texts."""
  texts = [*(text for shard in train for text in shard), *validation]
  tokenizer = train_tokenizer(texts[:2000], vocab_size)
  writer = StoreWriter(path, tokenizer)

  def shard(split, number, texts):
    documents = [(tokenizer.encode(t), len(t.encode())) for t in texts]
    return writer.write_shard(split, number, documents)

  shards = [shard("train", i, texts) for i, texts in enumerate(train)]
  writer.commit({"train": shards, "validation": [shard("validation", 0, validation)]})
  return path
