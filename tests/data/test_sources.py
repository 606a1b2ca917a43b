"""A batch is a function of (data_seed, step); every token is predicted once; eval is exact."""

import collections
import itertools
import json

import numpy as np
import pytest
from helpers.streams import B, L, assert_same, stream, take

from nanosam.data.batch import Batch, batch_hash, combine_hashes
from nanosam.data.sources import default_cache_dir, merge_states, open_source
from nanosam.data.store import StoreReader, StoreWriter
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.errors import UsageError, UserError

DOCUMENTS = [f"Document {i} says: {'word ' * (i % 7)}and café {i * i}.\n" for i in range(90)]
TRAIN, VALIDATION = DOCUMENTS[:69], DOCUMENTS[69:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("store") / "tiny"
  tokenizer = train_tokenizer(DOCUMENTS, 320)
  writer = StoreWriter(path, tokenizer)

  def shard(split, number, texts):
    documents = [(tokenizer.encode(t), len(t.encode())) for t in texts]
    return writer.write_shard(split, number, documents)

  # Borders in the middle of rows: a batch must not care.
  train = [shard("train", i, t) for i, t in enumerate((TRAIN[:20], TRAIN[20:21], TRAIN[21:]))]
  writer.commit({"train": train, "validation": [shard("validation", 0, VALIDATION)]})
  return path


@pytest.fixture(scope="module")
def source(directory):
  return open_source(f"tokens:{directory}", vocab_size=0, cache_dir="")


@pytest.fixture(scope="module")
def tokens(directory):
  split = StoreReader(directory).split("train")
  tokens = split.read(0, split.num_tokens).astype(np.int32)
  assert (len(tokens) - 1) % L, "the last row must need padding"
  return tokens


def rows_per_epoch(tokens):
  return -(-(len(tokens) - 1) // L)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_make_the_same_batch(source, hosts):
  whole = take(source, 30, mask_documents=True)
  n = B // hosts
  parts = [
    take(source, 30, rows=range(h * n, h * n + n), mask_documents=True) for h in range(hosts)
  ]
  joined = [
    type(whole[0])(*(np.concatenate(field) for field in zip(*batches, strict=True)))
    for batches in zip(*parts, strict=True)
  ]
  assert_same(joined, whole)


def test_workers_and_prefetch_do_not_matter(source):
  plain = take(source, 9, prefetch=0)
  assert_same(take(source, 9, prefetch=5), plain)
  assert_same(take(source, 9, workers=2), plain)


def test_restored_stream_continues_exactly(source):
  whole = take(source, 40)
  first = stream(source)
  for _ in range(23):
    next(first)
  state = json.loads(json.dumps(first.state()))
  assert_same(list(itertools.islice(first, 5)), whole[23:28])
  second = stream(source, prefetch=7)
  next(second)  # Restoring also works after it has begun to read ahead.
  second.restore(state)
  assert second.state() == state
  assert_same(list(itertools.islice(second, 17)), whole[23:])
  second.restore({**state, "step": 0})
  assert_same([next(second)], whole[:1])
  for s in (first, second):
    s.close()


def test_resume_on_another_number_of_hosts(source):
  whole = take(source, 12)
  one = stream(source)
  for _ in range(5):
    next(one)
  halves = [stream(source, rows=range(h, h + B // 2)) for h in (0, B // 2)]
  for half in halves:
    half.restore(merge_states([one.state()]))
    next(half)
  state = merge_states([half.state() for half in halves])
  parts = [next(half).inputs for half in halves]
  np.testing.assert_array_equal(np.concatenate(parts), whole[6].inputs)
  one.restore(state)
  assert_same([next(one)], whole[6:7])
  for s in (one, *halves):
    s.close()


def test_restoring_other_data_is_refused(source):
  s = stream(source)
  with pytest.raises(UserError, match="made with data 0123"):
    s.restore({**s.state(), "fingerprint": "0123"})


def test_rows_are_what_the_stream_holds(source, tokens):
  rows = {tuple(tokens[i : i + L + 1]) for i in range(0, len(tokens), L)}
  for batch in take(source, 5):
    assert {x.dtype for x in batch[:2]} == {np.dtype("int32")}
    assert batch.weights_BxL.dtype == np.float32
    assert batch.segments_BxL is None
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets_BxL[:, :-1])
    for inputs, targets, weights in zip(*batch[:3], strict=True):
      row = (*inputs.tolist(), targets[-1])
      assert row in rows or weights.min() == 0


def test_each_token_is_predicted_once_per_epoch(source, tokens):
  # Batches of one row end with the epoch exactly.
  num_rows = rows_per_epoch(tokens)
  batches = take(source, 2 * num_rows, batch_size=1, rows=range(1))
  for epoch in (batches[:num_rows], batches[num_rows:]):
    seen = collections.Counter()
    for batch in epoch:
      pairs = zip(batch.inputs[0], batch.targets_BxL[0], strict=True)
      seen.update(p for p, w in zip(pairs, batch.weights_BxL[0], strict=True) if w)
    assert seen == collections.Counter(itertools.pairwise(tokens))


def test_seeds_and_epochs_have_orders_of_their_own(source, tokens):
  num_rows = rows_per_epoch(tokens)

  def order(seed, epoch):
    batches = take(source, 3 * num_rows, batch_size=1, rows=range(1), data_seed=seed)
    return [b.inputs.tobytes() for b in batches[epoch * num_rows :][:num_rows]]

  orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
  assert len({tuple(o) for o in orders}) == len(orders)
  assert all(sorted(o) == sorted(orders[0]) for o in orders)
  in_file_order = [tokens[i : i + L].tobytes() for i in range(0, (num_rows - 1) * L, L)]
  assert orders[0][: num_rows - 1] != in_file_order


def test_a_batch_spans_the_end_of_an_epoch(source, tokens):
  num_rows = rows_per_epoch(tokens)
  assert num_rows % B, "the fixture must leave an incomplete batch"
  steps = num_rows // B + 2
  single = take(source, steps * B, batch_size=1, rows=range(1))
  batches = take(source, steps)
  rows = np.concatenate([b.inputs for b in batches])
  np.testing.assert_array_equal(rows, np.concatenate([b.inputs for b in single]))


def test_epoch_counts_passes(source, tokens):
  s = stream(source)
  assert s.epoch() == 0
  next(s)
  assert s.epoch() == pytest.approx(B / rows_per_epoch(tokens))
  s.restore({**s.state(), "step": 1000})
  assert s.epoch() == pytest.approx(1000 * B / rows_per_epoch(tokens))


def test_running_out_of_data(source, tokens):
  steps = rows_per_epoch(tokens) // B
  source.check_length(L=L, batch_size=B, steps=steps, repeat=False)
  source.check_length(L=L, batch_size=B, steps=10**6, repeat=True)
  with pytest.raises(UserError, match=rf"{len(tokens)} tokens.*{(steps + 1) * B * L} tokens"):
    source.check_length(L=L, batch_size=B, steps=steps + 1, repeat=False)
  s = stream(source, repeat=False)
  assert_same([next(s) for _ in range(steps)], take(source, steps))
  with pytest.raises(UserError, match=f"ends after {steps} steps"):
    next(s)
  s.close()


def test_documents_masked_from_each_other(source):
  bos = source.tokenizer.bos_id
  borders = 0
  for batch in take(source, 20, mask_documents=True):
    for inputs, targets, weights, segments in zip(*batch, strict=True):
      document = 1
      for i, (token, target) in enumerate(zip(inputs, targets, strict=True)):
        document += i > 0 and token == bos
        if segments[i]:  # 0 is padding
          assert segments[i] == document
          assert weights[i] == (target != bos)
        else:
          assert weights[i] == 0
      borders += document - 1
  assert borders > 20


def test_batch_hash_names_the_tokens(source):
  a, b = take(source, 2)
  assert batch_hash(a) == batch_hash(take(source, 1, prefetch=7)[0])
  names = {batch_hash(a), batch_hash(b), batch_hash(take(source, 1, data_seed=1)[0])}
  swapped = type(a)(*(x if x is None else x[::-1] for x in a))
  assert len({*names, batch_hash(swapped)}) == 4
  changed = a.inputs.copy()
  changed[3, 5] ^= 1
  assert batch_hash(a._replace(inputs=changed)) not in names
  assert all(len(name) == 16 for name in names)


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hashes_of_the_hosts_combine(source, hosts):
  whole = batch_hash(take(source, 1)[0])
  n = B // hosts
  starts = range(0, B, n)
  parts = [batch_hash(take(source, 1, rows=range(h, h + n))[0], first_row=h) for h in starts]
  assert combine_hashes(parts) == combine_hashes(reversed(parts)) == whole


def test_batch_hash_is_the_same_everywhere():
  """It is compared between runs, so that it must never change."""
  tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
  batch = Batch(tokens, tokens + 1, np.ones((2, 3), np.float32), None)
  assert batch_hash(batch) == "27c2df27d80710bc"


def test_rows_outside_the_batch_are_a_mistake(source):
  for rows in (range(0), range(4, B + 1), range(0, B, 2)):
    with pytest.raises(ValueError, match="not rows"):
      stream(source, rows=rows)


@pytest.mark.parametrize("rows", [6, 11, 1000])
def test_validation_is_a_prefix_of_whole_documents(source, rows):
  tokenizer = source.tokenizer
  expected, documents = [], 0
  for text in VALIDATION:
    longer = [*expected, tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    if len(longer) - 1 > rows * L:
      break
    expected, documents = longer, documents + 1
  found = source.validation(L=L, rows=rows, mask_documents=False)
  batch = found.batch
  assert found.documents == documents > 0
  assert found.bytes == sum(len(t.encode()) for t in VALIDATION[:documents])
  assert found.bytes > sum(len(t) for t in VALIDATION[:documents])  # bytes, not characters
  assert len(batch.inputs) == -(-(len(expected) - 1) // L) <= rows
  real = batch.weights_BxL.ravel() > 0
  assert real.sum() == len(expected) - 1
  assert batch.inputs.ravel()[real].tolist() == expected[:-1]
  assert batch.targets_BxL.ravel()[real].tolist() == expected[1:]
  assert (batch.targets_BxL.ravel()[~real] == tokenizer.pad_id).all()
  text = "".join(tokenizer.decode(batch.targets_BxL.ravel()[real]))
  assert text == "".join(VALIDATION[:documents])


def test_validation_masks_documents(source):
  plain = source.validation(L=L, rows=1000, mask_documents=False)
  masked = source.validation(L=L, rows=1000, mask_documents=True)
  assert (masked.bytes, masked.documents) == (plain.bytes, plain.documents)
  lost = plain.batch.weights_BxL.sum() - masked.batch.weights_BxL.sum()
  assert lost == masked.documents - 1  # Only the bos of each later document.
  assert masked.batch.segments_BxL.ravel()[-1] == 0 or masked.batch.weights_BxL.ravel()[-1] == 1


@pytest.mark.parametrize("length", [8, 200])
def test_rows_of_one_document_are_the_references(source, length):
  """[:L] of bos, text and eos: the inputs; shifted by one, the targets, which have no bos."""
  tok = source.tokenizer
  found = source.validation(L=length, rows=12, mask_documents=False, eval_rows="documents")
  texts = VALIDATION[:12]
  assert found.documents == len(found.batch.targets_BxL) == 12
  for row, text in enumerate(texts):
    ids = [tok.bos_id, *tok.encode(text), tok.eos_id][:length]
    x, y, w = (np.asarray(a[row]) for a in found.batch[:3])
    np.testing.assert_array_equal(x[: len(ids)], ids)
    np.testing.assert_array_equal(y[: len(ids) - 1], ids[1:])
    np.testing.assert_array_equal(w, np.arange(length) < len(ids) - 1)
  if length == 200:
    assert found.bytes == sum(len(t.encode()) for t in texts)
  else:
    heads = [[tok.bos_id, *tok.encode(t)][:length] for t in texts]
    assert found.bytes == sum(len(tok.decode(h).encode()) for h in heads)
    assert all(t.startswith(tok.decode(h)) for t, h in zip(texts, heads, strict=True))
  every = source.validation(L=length, rows=500, mask_documents=False, eval_rows="documents")
  assert every.documents == len(VALIDATION), "fewer rows than were asked for"


def test_validation_documents_that_fit_exactly(source):
  targets = len(source.tokenizer.encode(VALIDATION[0])) + 1  # The first bos is never a target.
  assert source.validation(L=1, rows=targets, mask_documents=False).documents == 1
  with pytest.raises(UserError, match=f"the first needs {targets}"):
    source.validation(L=1, rows=targets - 1, mask_documents=False)


def test_validation_set_too_small_for_a_document(source):
  with pytest.raises(UserError, match="no validation document fits"):
    source.validation(L=4, rows=1, mask_documents=False)


@pytest.mark.parametrize("name", ["c4", "tokens:", "tfds:", "embedded:x", ""])
def test_unknown_source_lists_the_known(name):
  with pytest.raises(
    UsageError, match="use 'embedded', 'tokens:DIR', 'text:FILE', 'tfds:NAME' or 'tfds:"
  ):
    open_source(name, vocab_size=512, cache_dir="")


def test_source_that_is_no_store_is_named(tmp_path):
  with pytest.raises(UserError, match=str(tmp_path)):
    open_source(f"tokens:{tmp_path}", vocab_size=0, cache_dir="")


def test_cache_directory(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  monkeypatch.delenv("NANOSAM_CACHE", raising=False)
  assert default_cache_dir() == tmp_path / "xdg" / "nanosam"
  monkeypatch.setenv("NANOSAM_CACHE", str(tmp_path / "own"))
  assert default_cache_dir() == tmp_path / "own"
