"""Losses by document, against a dense model that is asked row by row and token by token."""

import itertools

import jax
import numpy as np
import pytest
from helpers.stores import write_store
from scipy import special

from nanosam.data.store import StoreReader
from nanosam.model import sharding
from nanosam.model.classifier import make_network
from nanosam.model.transformer import unembedding
from nanosam.run.scoring import Scorer, document_losses
from nanosam.run.step import TrainStep

TEXTS = [f"Document {i} says: {'word ' * (i % 7)}and {i * i}.\n" for i in range(60)]
LONG = "A very long one. " + " ".join(str(n * n) for n in range(400))  # many batches of rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
  path = tmp_path_factory.mktemp("store") / "tiny"
  return StoreReader(write_store(path, [TEXTS[:20], [TEXTS[20], LONG], TEXTS[21:40]], TEXTS[40:]))


@pytest.fixture
def config(tiny_config):
  tiny_config.eval_batch_size = 8
  tiny_config.model.dtype = "float32"
  return tiny_config


def make(config, store, devices=1, batch_size=8):
  config.eval_batch_size = batch_size
  mesh = sharding.make_mesh(1, -1, devices=jax.devices()[:devices])
  step = TrainStep(config, store.vocab_size, mesh)
  split = store.split("train")
  return Scorer(step.model, split, store.tokenizer, config, mesh), step.init(7).params, split


def dense(config, store, params):
  """The mean loss of each document, from all logits of each row."""
  split, L, t = store.split("train"), config.model.L, store.tokenizer
  network = make_network(config, store.vocab_size)
  apply = jax.jit(lambda row, segments: network.apply({"params": params}, row, segments))
  tokens = split.read(0, split.num_tokens).astype(np.int32)
  lengths = split.documents()[:, 0]
  document = np.repeat(np.arange(len(lengths)), lengths)
  total, count = np.zeros(len(lengths)), np.zeros(len(lengths))
  for start in range(0, len(tokens) - 1, L):
    row = np.full(L + 1, t.pad_id, np.int32)
    row[: len(tokens[start : start + L + 1])] = tokens[start : start + L + 1]
    segments = None
    if config.data.mask_documents:
      segments = np.cumsum(row[:-1] == t.bos_id) + (row[0] != t.bos_id)
    h = apply(row[None, :-1], None if segments is None else segments[None])
    log_p = special.log_softmax(np.asarray(h[0], np.float64) @ np.asarray(unembedding(params)).T, 1)
    for i, target in enumerate(row[1:]):
      place = start + 1 + i
      if place < len(tokens) and target != t.bos_id:
        total[document[place]] -= log_p[i, target]
        count[document[place]] += 1
  np.testing.assert_array_equal(count, lengths - 1)  # every token but bos, once
  return total / count


@pytest.mark.parametrize("masked", [False, True])
def test_a_documents_loss_is_that_of_its_tokens(config, store, masked):
  config.data.mask_documents = masked
  scorer, params, split = make(config, store)
  assert split.documents()[:, 0].max() > 10 * 8 * config.model.L  # ten batches of one document
  found = document_losses(scorer, params)
  np.testing.assert_allclose(found, dense(config, store, params), rtol=2e-5)


def test_neither_batch_size_nor_devices_matter(config, store):
  one, params, _ = make(config, store)
  found = document_losses(one, params)
  for devices, batch_size in ((1, 50), (8, 9)):
    other, params, _ = make(config, store, devices, batch_size)
    np.testing.assert_allclose(document_losses(other, params), found, rtol=1e-5)


def test_any_position_is_one_to_resume_from(config, store):
  scorer, params, split = make(config, store)
  whole = list(scorer(params))
  assert sum(len(x.loss) for x in whole) == split.num_documents
  assert [x.first for x in whole] == [0, *np.cumsum([len(x.loss) for x in whole])[:-1]]
  for i in (0, 3, len(whole) // 2, len(whole) - 1):
    rest = list(itertools.islice(scorer(params, whole[i].at), 5))
    assert len(rest) == min(5, len(whole) - 1 - i)
    for a, b in zip(rest, whole[i + 1 :], strict=False):
      assert a.first == b.first and a.at == b.at
      np.testing.assert_array_equal(a.loss, b.loss)


def test_some_rows_are_enough_for_the_documents_that_end_in_them(config, store):
  scorer, params, split = make(config, store)
  found = document_losses(scorer, params, rows=16)
  ends = np.cumsum(split.documents()[:, 0])
  assert 0 < len(found) == np.sum(ends <= 16 * config.model.L + 1)
  np.testing.assert_array_equal(found, document_losses(scorer, params)[: len(found)])


def test_ends_of_documents(store):
  split, rng = store.split("train"), np.random.default_rng(0)
  ends = np.cumsum(split.documents()[:, 0])
  for start, stop in [(0, 1), (0, ends[-1]), *rng.integers(0, ends[-1] + 9, (200, 2))]:
    first, found = split.ends(int(start), int(stop))
    inside = np.flatnonzero((ends > start) & (ends <= stop))
    np.testing.assert_array_equal(found, ends[inside])
    assert not len(inside) or first == inside[0]


def test_flops_are_those_of_a_forward_pass_over_all_tokens(config, store):
  config.head.chunk = 6  # which divides L
  scorer, params, _ = make(config, store)
  D, F, L, V = config.model.D, config.model.F, config.model.L, store.vocab_size
  by_token = 2 * (4 * D * D + 2 * D * F) + 2 * 2 * L * D + 2 * D * V
  assert scorer.flops(params) == pytest.approx(by_token * len(scorer) * L, rel=0.02)
