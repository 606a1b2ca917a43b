"""A store with weights: which documents an epoch shows how often, and on what that depends."""

import collections
import itertools
import json

import numpy as np
import pytest
from etils import epath
from helpers.stores import write_store
from helpers.streams import B, L, assert_same, stream, take

from nanosam import config as config_lib
from nanosam import plan
from nanosam.data import inspect
from nanosam.data.sources import merge_states, open_source, source_of
from nanosam.data.weights import Chosen, Extra, Weights, read_weights
from nanosam.system.errors import UsageError, UserError

TEXTS = [f"Document {i} says: {'word ' * (i % 7)}and café {i * i}.\n" for i in range(90)]
TRAIN, VALIDATION = TEXTS[:69], TEXTS[69:]
COPIES = np.array([1 + (i % 3 == 1) + 2 * (i in (5, 6, 68)) for i in range(69)], np.uint8)
REPHRASED = ["A text that the store lacks.", "And another one of them, somewhat longer."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("store") / "tiny"
  return write_store(path, [TRAIN[:20], TRAIN[20:21], TRAIN[21:]], VALIDATION)


@pytest.fixture(scope="module")
def plain(directory):
  return open_source(f"tokens:{directory}", vocab_size=0, cache_dir="")


def framed(source, text):
  t = source.tokenizer
  return np.array([t.bos_id, *t.encode(text), t.eos_id])


def write(path, source, copies=COPIES, extra=(), **facts):
  documents = [(framed(source, text), len(text.encode())) for text in extra]
  facts = {"store": source.fingerprint, "feature": "last", "choose": "hard", **facts}
  facts |= {"copies": 2, "steps": [4], "flops": {"proxy": 2e6, "scoring": 1e6}}
  Weights(copies, copies > 1, Extra.of(documents), facts).save(epath.Path(path))
  return path


@pytest.fixture(scope="module")
def file(plain, tmp_path_factory):
  return write(tmp_path_factory.mktemp("weights") / "w.npz", plain, extra=REPHRASED)


def data(directory, file):
  d = config_lib.default().data
  d.source, d.weights = f"tokens:{directory}", str(file)
  return d


@pytest.fixture(scope="module")
def source(directory, file):
  return source_of(data(directory, file))


def epoch_rows(source, steps=1, **options):
  """The tokens of every row of an epoch that count, in order."""
  s = stream(source, batch_size=1, rows=range(1), **options)
  rows = round(1 / (next(s), s.epoch())[1])
  s.close()
  batches = take(source, steps * rows, batch_size=1, rows=range(1), **options)
  return [
    np.append(b.inputs[0], b.targets_BxL[0, -1])[: int(b.weights_BxL.sum()) + 1] for b in batches
  ]


def test_every_document_is_shown_as_often_as_it_has_copies(source, plain):
  texts = [*TRAIN, *REPHRASED]
  copies = [*COPIES.tolist(), *[1] * len(REPHRASED)]
  wanted = collections.Counter()
  for text, n in zip(texts, copies, strict=True):
    wanted.update(n * list(itertools.pairwise(framed(plain, text).tolist())))
  rows, size = epoch_rows(source, steps=2), len(epoch_rows(source))
  assert len(rows) == 2 * size
  for epoch in (rows[:size], rows[size:]):
    seen = collections.Counter(pair for row in epoch for pair in itertools.pairwise(row.tolist()))
    border = (source.tokenizer.eos_id, source.tokenizer.bos_id)
    assert seen.pop(border) > 50  # what joins two documents belongs to neither
    assert seen == wanted
  assert source.train_documents == sum(copies)
  assert source.train_tokens == sum(
    n * len(framed(plain, t)) for t, n in zip(texts, copies, strict=True)
  )
  assert source.train_bytes == sum(n * len(t.encode()) for t, n in zip(texts, copies, strict=True))


def test_no_row_holds_two_copies_of_a_document(plain, directory, tmp_path):
  """Even if what is repeated ends the first pass and is all of the second."""
  copies = np.ones(69, np.uint8)
  copies[68] = 5
  source = source_of(data(directory, write(tmp_path / "w.npz", plain, copies)))
  last = framed(plain, TRAIN[68])
  assert len(last) < 40
  wide = {"L": 200}
  holding = 0
  for row in epoch_rows(source, **wide):
    text = source.tokenizer.decode(row)
    assert text.count("Document 68") <= 1
    holding += "Document 68" in text
  assert holding == 5


def test_the_first_pass_has_the_rows_of_the_store(source, plain):
  ours = collections.Counter(row.tobytes() for row in epoch_rows(source))
  stores = collections.Counter(row.tobytes() for row in epoch_rows(plain))
  assert stores and stores <= ours


def test_weights_of_one_change_nothing(plain, directory, tmp_path):
  file = write(tmp_path / "w.npz", plain, np.ones(69, np.uint8))
  assert_same(take(source_of(data(directory, file)), 30), take(plain, 30))


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_depends_on_seed_and_step_alone(source, masked):
  whole = take(source, 40, mask_documents=masked)
  assert_same(take(source, 40, workers=2, mask_documents=masked), whole)
  for hosts in (2, 4):
    n = B // hosts
    parts = [take(source, 40, rows=range(h, h + n), mask_documents=masked) for h in range(0, B, n)]
    joined = [
      type(whole[0])(*(x[0] if x[0] is None else np.concatenate(x) for x in zip(*b, strict=True)))
      for b in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)
  first = stream(source, mask_documents=masked)
  for _ in range(23):
    next(first)
  state = json.loads(json.dumps(merge_states([first.state()])))
  first.close()
  second = stream(source, prefetch=7, mask_documents=masked)
  second.restore(state)
  assert_same(list(itertools.islice(second, 17)), whole[23:])
  second.close()


def test_another_file_is_refused_at_a_restart(source, plain, directory, tmp_path):
  other = COPIES.copy()
  other[3] += 1
  states = {"": stream(plain).state(), "these": stream(source).state()}
  others = source_of(data(directory, write(tmp_path / "w.npz", plain, other, REPHRASED)))
  states["others"] = stream(others).state()
  assert states[""].keys() == {"step", "fingerprint"}  # as before there were weights
  assert states["these"]["fingerprint"] == states[""]["fingerprint"]
  stream(source).restore(states["these"])
  for name in ("", "others"):
    with pytest.raises(UserError, match=r"made with data\.weights .* restore that file"):
      stream(source).restore(states[name])
  with pytest.raises(UserError, match="these are unset"):
    stream(plain).restore(states["these"])


def test_chosen_documents_read_like_their_concatenation(plain):
  split, rng = plain.store.split("train"), np.random.default_rng(0)
  lengths = split.documents()[:, 0]
  starts = np.cumsum(lengths) - lengths
  for share in (0.0, 0.1, 0.5, 1.0):
    chosen = rng.random(69) < share
    whole = np.concatenate(
      [
        np.empty(0, int),
        *(split.read(starts[d], starts[d] + lengths[d]) for d in chosen.nonzero()[0]),
      ]
    )
    found = Chosen(split, chosen)
    assert found.num_tokens == len(whole) and found.num_documents == chosen.sum()
    for start, stop in rng.integers(0, len(whole) + 20, (200, 2)):
      np.testing.assert_array_equal(found.read(start, stop), whole[start:stop])


def test_an_epoch_ends_where_its_rows_do(source):
  rows = len(epoch_rows(source))
  source.check_length(L=L, batch_size=B, steps=rows // B, repeat=False)
  with pytest.raises(UserError, match="enough for"):
    source.check_length(L=L, batch_size=B, steps=rows // B + 1, repeat=False)


def test_validation_is_untouched(source, plain):
  theirs, ours = (s.validation(L=L, rows=20, mask_documents=False) for s in (plain, source))
  assert_same([ours.batch], [theirs.batch])
  assert source.independent_rows(L) == plain.independent_rows(L)


def test_weights_of_another_store_are_refused(plain, directory, tmp_path):
  file = write(tmp_path / "w.npz", plain, store="0123")
  with pytest.raises(UserError, match=f"store 0123 .* this one is {plain.fingerprint}"):
    source_of(data(directory, file))


def test_a_damaged_file_is_named(file, directory, tmp_path):
  content = file.read_bytes()
  damaged = tmp_path / "damaged.npz"
  for part in (content[: len(content) // 2], content[:-10], b"", b"x" * 100):
    damaged.write_bytes(part)
    with pytest.raises(UserError, match=r"damaged.npz is damaged .* make it again") as e:
      read_weights(str(damaged))
    assert "\n" not in str(e.value)
  with np.load(file) as f:
    arrays = dict(f)
  arrays["copies"] = np.roll(arrays["copies"], 1)
  np.savez(damaged, **arrays)
  with pytest.raises(UserError, match="does not match its hash"):
    read_weights(str(damaged))
  with pytest.raises(UserError, match=r"cannot read data\.weights"):
    source_of(data(directory, tmp_path / "nothing.npz"))


def test_plan_adds_what_the_weights_cost(file):
  c = config_lib.default()
  c.data.weights = str(file)
  facts = {"topology": "v4:2x2x1", "device_kind": "TPU v4", "flops_per_device": 1e12, "devices": 4}
  found = plan.run_cost(c, facts, peak=1e9, utilization=0.5)
  assert found["weights_flops"] == 3e6
  assert found["weights_chip_hours"] == pytest.approx(3e6 / 5e8 / 3600)
  c.data.weights = ""
  assert "weights_flops" not in plan.run_cost(c, facts, peak=1e9, utilization=0.5)


def test_other_sources_say_that_they_need_a_store(file, tmp_path, cache):
  d = config_lib.default().data
  d.source, d.weights = "digits", str(file)
  with pytest.raises(UsageError, match="needs a token store, and digits is none"):
    source_of(d)


def test_another_source_has_no_weights(directory, file, plain):
  """As when a run with weights is evaluated on other data."""
  assert source_of(data(directory, file), f"tokens:{directory}").weights is None


def test_inspect_describes_an_epoch(directory, file, source, capsys, monkeypatch):
  monkeypatch.setattr(inspect, "_SECONDS", 0.05)
  words = [f"--source=tokens:{directory}", f"--weights={file}", "--length=16", "--batch_size=4"]
  inspect.main(["inspect", *words, "--json"])
  found = json.loads(capsys.readouterr().out)
  assert found["tokens"] == source.train_tokens and found["fingerprint"] == source.fingerprint
  assert found["weights"]["hash"] == source.weights.hash
  inspect.main(["inspect", *words])
  assert "hard documents 2 times an epoch, by last" in capsys.readouterr().out
