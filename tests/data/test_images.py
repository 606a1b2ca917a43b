"""Images: each once per epoch, the same on any number of hosts; clear words where one is bad."""

import functools
import pickle
import sys

import numpy as np
import pytest
from helpers.pictures import CLASSES, picture, write_folder, write_tfds
from helpers.streams import assert_same, stream, take
from PIL import Image

from nanosam.data.batch import batch_hash, combine_hashes
from nanosam.data.sources import open_source, text_of
from nanosam.system.errors import UsageError, UserError


@pytest.fixture
def open_it(tmp_path):
  return lambda name: open_source(name, vocab_size=0, cache_dir=str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
  return open_source("digits", vocab_size=0, cache_dir=str(tmp_path_factory.mktemp("cache")))


def everything(source, rows=10**6):
  return source.validation(L=1, rows=rows, mask_documents=False).batch


def epoch(source, images, **changes):
  return take(source, images, batch_size=1, rows=range(1), **changes)


def test_digits(digits):
  assert (digits.outputs, digits.image_size) == (10, 8)
  held_out = everything(digits)
  assert held_out.inputs.shape[1:] == (8, 8, 3) and held_out.inputs.dtype == np.uint8
  assert 300 < len(held_out.inputs) < 420
  assert held_out.targets_BxL.shape == held_out.weights_BxL.shape == (len(held_out.inputs), 1)
  counts = np.bincount(everything(digits, 200).targets_BxL[:, 0], minlength=10)
  assert counts.min() > 5, "the beginning holds all classes"
  (batch,) = take(digits, 1)
  assert batch.inputs.shape == (8, 8, 8, 3) and batch.targets_BxL.dtype == np.int32
  assert batch.inputs.max() == 255 and batch.segments_BxL is None


def test_every_image_once_per_epoch_in_an_order_of_the_seed(digits):
  count = 1797 - len(everything(digits).inputs)
  orders = {
    seed: [b.inputs.tobytes() for b in epoch(digits, 2 * count, data_seed=seed)] for seed in (0, 1)
  }
  for order in orders.values():
    first, second = order[:count], order[count:]
    assert sorted(first) == sorted(second) and first != second
  assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
  held_out = {x.tobytes() for x in everything(digits).inputs}
  assert len(held_out & set(orders[0])) < 5  # twins, if any


def test_a_batch_depends_on_neither_hosts_nor_restarts(digits):
  whole = take(digits, 6)
  halves = [take(digits, 6, rows=rows) for rows in (range(4), range(4, 8))]
  for batch, *parts in zip(whole, *halves, strict=True):
    np.testing.assert_array_equal(batch.inputs, np.concatenate([p.inputs for p in parts]))
    hashes = [batch_hash(part, first) for part, first in zip(parts, (0, 4), strict=True)]
    assert combine_hashes(hashes) == batch_hash(batch)
  again = stream(digits)
  again.restore({"step": 4, "fingerprint": digits.fingerprint})
  assert_same([next(again), next(again)], whole[4:])
  assert again.epoch() == pytest.approx(6 * 8 / (1797 - len(everything(digits).inputs)))
  assert again.state() == {"step": 6, "fingerprint": digits.fingerprint}
  again.close()


@pytest.mark.full
def test_worker_processes_read_the_same(digits):
  assert_same(take(digits, 4, workers=2), take(digits, 4))


def test_a_pickled_split_is_its_name(digits):
  rows = stream(digits)._batches.rows
  assert len(pickle.dumps(rows)) < 1000
  assert_same([pickle.loads(pickle.dumps(rows)).batch([3, 1])], [rows.batch([3, 1])])


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_folder_with_validation(open_it, tmp_path, name):
  source = open_it(write_folder(tmp_path / "pets", train=6, **{name: 3}))
  assert (source.outputs, source.image_size) == (2, 8)
  batch = everything(source)
  expected = {
    picture(1000 + 100 * label + i).tobytes(): label for label in (0, 1) for i in range(3)
  }
  found = {x.tobytes(): int(y) for x, y in zip(batch.inputs, batch.targets_BxL[:, 0], strict=True)}
  assert found == expected
  train = epoch(source, 12)
  assert len({b.inputs.tobytes() for b in train}) == 12
  assert sum(int(b.targets_BxL[0, 0]) for b in train) == 6


def test_a_folder_without_validation_holds_some_back(open_it, tmp_path):
  source = open_it(write_folder(tmp_path / "pets", train=30))
  held_out = {x.tobytes() for x in everything(source).inputs}
  train = {b.inputs.tobytes() for b in epoch(source, 60 - len(held_out))}
  assert 5 <= len(held_out) <= 20 and len(train | held_out) == 60


def test_another_place_is_the_same_data_and_another_image_is_not(open_it, tmp_path):
  first = open_it(write_folder(tmp_path / "a", train=5, test=2))
  assert open_it(write_folder(tmp_path / "b", train=5, test=2)).fingerprint == first.fingerprint
  Image.fromarray(picture(77)).save(tmp_path / "b" / "train" / "cat" / "000.png")
  second = open_it(f"images:{tmp_path / 'b'}")
  assert second.fingerprint != first.fingerprint and second.coding == first.coding
  resumed = stream(second)
  with pytest.raises(UserError, match="the checkpoint was made with data"):
    resumed.restore({"step": 1, "fingerprint": first.fingerprint})


def test_grey_and_jpeg_become_rgb(open_it, tmp_path):
  name = write_folder(tmp_path / "pets", train=4, test=2)
  Image.fromarray(picture(0, (8, 8))).save(tmp_path / "pets/train/cat/grey.PNG")
  Image.fromarray(picture(1)).save(tmp_path / "pets/train/cat/photo.jpg")
  assert len({b.inputs.tobytes() for b in epoch(open_it(name), 10)}) == 10


def test_tfds(open_it, tmp_path):
  folder = open_it(write_folder(tmp_path / "pets", train=5, test=2))
  files = {
    split: [
      (p, CLASSES.index(p.parent.name)) for p in sorted((tmp_path / "pets" / split).rglob("*.png"))
    ]
    for split in ("train", "test")
  }
  source = open_it(write_tfds(tmp_path / "tfds", files))
  assert (source.outputs, source.image_size) == (2, 8)
  assert source.coding == folder.coding

  def pairs(batches):
    return {
      (b.inputs[i].tobytes(), int(b.targets_BxL[i, 0]))
      for b in batches
      for i in range(len(b.inputs))
    }

  assert pairs([everything(source)]) == pairs([everything(folder)])
  assert pairs(epoch(source, 10)) == pairs(epoch(folder, 10))
  assert "tensorflow" not in sys.modules


def test_classes_can_be_merged(tmp_path):
  open_it = functools.partial(open_source, "digits", vocab_size=0, cache_dir=str(tmp_path))
  ten, two = open_it(), open_it(classes=2)
  assert two.outputs == 2 and two.coding != ten.coding
  a, b = everything(ten), everything(two)
  np.testing.assert_array_equal(a.inputs, b.inputs)
  np.testing.assert_array_equal(a.targets_BxL % 2, b.targets_BxL)
  with pytest.raises(UsageError, match=r"data\.classes=11 must lie between 2 and the 10"):
    open_it(classes=11)


def test_too_few_images_for_the_steps(digits):
  digits.check_length(L=1, batch_size=8, steps=1000, repeat=True)
  with pytest.raises(UserError, match=r"training images, but 1000 steps of 8 .*data.repeat=True"):
    digits.check_length(L=1, batch_size=8, steps=1000, repeat=False)
  with pytest.raises(UserError, match="training data ends after"):
    epoch(digits, 2000, repeat=False)


def test_what_is_for_text_alone(digits):
  with pytest.raises(UsageError, match="digits holds images"):
    text_of(digits, "digits")


def spoil(place, how):
  place.mkdir(exist_ok=True)
  match how:
    case "unequal":
      Image.fromarray(picture(0, (8, 9, 3))).save(place / "x.png")
    case "broken":
      (place / "x.jpg").write_bytes(b"no image")
    case "truncated":
      Image.fromarray(picture(0, (64, 64, 3))).save(place / "x.jpg")
      (place / "x.jpg").write_bytes((place / "x.jpg").read_bytes()[:600])


@pytest.mark.parametrize(
  "where, how, said",
  [
    ("train/cat", "unequal", r"x\.png is 9 x 8 pixels, but .*8 x 8 pixels: .*-resize"),
    ("test/cat", "unequal", r"x\.png is 9 x 8 pixels, but .*8 x 8 pixels: .*-resize"),
    ("train/cat", "broken", r"train/cat/x\.jpg cannot be read as an image .*replace or delete it"),
    ("train/cat", "truncated", r"train/cat/x\.jpg cannot be read .*Truncated.*replace or delete"),
    ("train/cow", "nothing", r"train/cow has no images .*add some, or remove the folder"),
    ("test/cow", "broken", r"test/cow: there is no such class in training, only cat, dog"),
  ],
)
def test_bad_images_are_named_in_one_line(open_it, tmp_path, where, how, said):
  name = write_folder(tmp_path / "pets", train=4, test=2)
  spoil(tmp_path / "pets" / where, how)
  with pytest.raises(UserError, match=said) as e:
    open_it(name)
  assert "\n" not in str(e.value)
  assert not list((tmp_path / "cache").glob("*")), "nothing half-made stays"


def test_bad_folders(open_it, tmp_path):
  with pytest.raises(UsageError, match=r"no folder .*train: put images in .*train/CLASS"):
    open_it(f"images:{tmp_path}")
  (tmp_path / "train" / "cat").mkdir(parents=True)
  Image.fromarray(picture(0, (4, 6, 3))).save(tmp_path / "train" / "cat" / "x.png")
  with pytest.raises(UserError, match=r"only 1 class of images \(cat\)"):
    open_it(f"images:{tmp_path}")
  with pytest.raises(UsageError, match="remote: copy it"):
    open_it("images:gs://bucket/pets")
  (tmp_path / "train" / "dog").mkdir()
  for i in range(9):
    Image.fromarray(picture(i, (4, 6, 3))).save(tmp_path / "train" / "dog" / f"{i}.png")
  with pytest.raises(UserError, match="is 6 x 4 pixels, and images must be square"):
    open_it(f"images:{tmp_path}")


@pytest.mark.parametrize("package, module", [("Pillow", "PIL"), ("scikit-learn", "sklearn")])
def test_a_missing_package_names_the_extra(open_it, tmp_path, monkeypatch, package, module):
  name = "digits" if module == "sklearn" else write_folder(tmp_path / "pets", train=9)
  for known in list(sys.modules):
    if known.partition(".")[0] == module:
      monkeypatch.delitem(sys.modules, known)
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(UserError, match=rf"{package}, which is missing: pip install .*\[vision\]"):
    open_it(name)


def test_a_damaged_cache_is_named(open_it, tmp_path):
  name = write_folder(tmp_path / "pets", train=4, test=2)
  open_it(name)
  (file,) = (tmp_path / "cache").glob("*/train.images.npy")
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(UserError, match=r"is damaged .*delete it, and it will be made again"):
    open_it(name)
