"""Images with labels, packed once into memory-mapped arrays: the batch of a step is a look-up.

A batch depends on (data_seed, step) alone. All images of a source are square and of one size, and
become RGB. The validation split is `validation`, or `test`; where there is neither, a fifth of the
training images is held out.
"""

import functools
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanosam.data.batch import Batch, EvalSet, StreamOptions
from nanosam.data.packing import HostBatches
from nanosam.data.stream import StoreStream
from nanosam.system.errors import UsageError, UserError, first_line, need
from nanosam.system.files import build_folder
from nanosam.system.remote import is_remote

FORMAT = 1  # raise it when the same files give other arrays
MANIFEST = "manifest.json"  # written last
TRAIN, VALIDATION, TEST = "train", "validation", "test"
SUFFIXES = (".jpg", ".jpeg", ".png")
_HELD_OUT_ONE_IN = 5
_EXTRA = "pip install -e '.[vision]'"
_RESIZE = "make them all alike, for example with mogrify -resize '32x32!' (ImageMagick)"


class Example(NamedTuple):
  key: str  # decides its place in the split
  name: str  # for messages
  load: Callable[[], tuple[np.ndarray, int]]  # [height, width, 3] of uint8, and the class


Splits = Mapping[str, Sequence[Example]]


def open_digits(cache_dir: Path, classes: int = 0) -> "ImageSource":
  """The 1,797 handwritten digits, 8 x 8 pixels, that come with scikit-learn."""
  try:
    from sklearn.datasets import load_digits
  except ImportError as e:
    raise UserError(f"the digits are part of scikit-learn, which is missing: {_EXTRA}") from e
  digits = load_digits()
  gray_NxSxS = np.round(digits.images * (255 / 16)).astype(np.uint8)

  def load(i: int) -> tuple[np.ndarray, int]:
    return np.repeat(gray_NxSxS[i, ..., None], 3, axis=-1), int(digits.target[i])

  numbers = range(len(gray_NxSxS))
  examples = [Example(str(i), f"digit {i}", functools.partial(load, i)) for i in numbers]
  content = hashlib.sha256(gray_NxSxS.tobytes() + digits.target.tobytes()).hexdigest()
  names = [str(name) for name in digits.target_names]
  return ImageSource(_packed(cache_dir, "digits", content, names, {TRAIN: examples}), classes)


def open_folder(folder: str, cache_dir: Path, classes: int = 0) -> "ImageSource":
  """DIR/train/CLASS/*.jpg|png, and the same below DIR/validation or DIR/test."""
  if is_remote(folder):
    raise UsageError(f"images:{folder} is remote: copy it to this machine first")
  root = Path(folder).expanduser()
  if not (root / TRAIN).is_dir():
    raise UsageError(f"there is no folder {root / TRAIN}: put images in {root}/train/CLASS/*.jpg")
  names = [folder.name for folder in _subfolders(root / TRAIN)]
  files = {split: _files(root / split, names) for split in (TRAIN, VALIDATION, TEST)}
  states = [(p.relative_to(root).as_posix(), p.stat()) for found in files.values() for p in found]
  content = json.dumps([(file, s.st_size, s.st_mtime_ns) for file, s in states])
  number = {name: i for i, name in enumerate(names)}

  def load(path: Path) -> tuple[np.ndarray, int]:
    return _decode(path, str(path)), number[path.parent.name]

  splits = {
    split: [Example(f"{p.parent.name}/{p.name}", str(p), functools.partial(load, p)) for p in found]
    for split, found in files.items()
  }
  return ImageSource(_packed(cache_dir, "images", content, names, splits), classes)


def _subfolders(folder: Path) -> list[Path]:
  return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
  """The images of a split; none if there is no such split."""
  found: list[Path] = []
  for place in _subfolders(folder) if folder.is_dir() else []:
    images = sorted(p for p in place.iterdir() if p.suffix.lower() in SUFFIXES)
    if not images:
      kinds = ", ".join(SUFFIXES)
      raise UserError(f"{place} has no images ({kinds}): add some, or remove the folder")
    if place.name not in names:
      raise UserError(f"{place}: there is no such class in training, only {', '.join(names)}")
    found += images
  return found


def _decode(source: Path | io.BytesIO, name: str) -> np.ndarray:
  try:
    from PIL import Image
  except ImportError as e:
    raise UserError(f"reading images needs Pillow, which is missing: {_EXTRA}") from e
  try:
    with Image.open(source) as image:
      return np.asarray(image.convert("RGB"))
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
    raise UserError(
      f"{name} cannot be read as an image ({first_line(e)}): replace or delete it"
    ) from e


def open_tfds(directory: str, cache_dir: Path, classes: int = 0) -> "ImageSource":
  """A TFDS data set with an image and a label."""
  from nanosam.data.tfds import local, open_builder  # slow to import

  builder = open_builder(local(directory, cache_dir))
  image, label = _feature(builder, "Image"), _feature(builder, "ClassLabel")
  splits = {
    split: _tfds_examples(builder, split, image, label)
    for split in (TRAIN, VALIDATION, TEST)
    if split in builder.info.splits
  }
  if not splits.get(TRAIN):
    raise UserError(f"{directory} has no train split, only {', '.join(builder.info.splits)}")
  lengths = {split: list(i.shard_lengths) for split, i in builder.info.splits.items()}
  content = json.dumps([builder.info.full_name, str(builder.data_dir), lengths])
  names = builder.info.features[label].names
  return ImageSource(_packed(cache_dir, "tfds", content, names, splits), classes)


def _feature(builder: Any, kind: str) -> str:
  """The name of the one feature of a kind."""
  features = builder.info.features.items()
  names = [name for name, feature in features if type(feature).__name__ == kind]
  if len(names) != 1:
    raise UserError(
      f"{builder.data_dir} has {len(names)} features of type {kind}, and one is needed: it has "
      + ", ".join(name for name, _ in features)
    )
  return names[0]


def _tfds_examples(builder: Any, split: str, image: str, label: str) -> list[Example]:
  import tensorflow_datasets as tfds

  # Decoded here, like files: TFDS would use OpenCV where it finds it, which decodes differently.
  stored = builder.as_data_source(split, decoders={image: tfds.decode.SkipDecoding()})
  where = f"{builder.data_dir}: image {{}} of {split}"

  def load(i: int) -> tuple[np.ndarray, int]:
    example = stored[i]
    return _decode(io.BytesIO(example[image]), where.format(i)), int(example[label])

  numbers = range(len(stored))
  return [Example(str(i), where.format(i), functools.partial(load, i)) for i in numbers]


def _packed(cache_dir: Path, kind: str, content: str, names: Sequence[str], splits: Splits) -> Path:
  """The folder of the arrays, made on first use; `content` identifies the images by themselves."""
  if len(names) < 2:
    raise UserError(f"only {len(names)} class of images ({', '.join(names)}): two are needed")
  chosen = _with_validation(splits)
  key = hashlib.sha256(json.dumps([FORMAT, content, list(names)]).encode()).hexdigest()[:12]
  final, total = cache_dir.expanduser() / f"{kind}-{key}", sum(map(len, chosen.values()))
  write = functools.partial(_pack, names=names, splits=chosen)
  return build_folder(final, MANIFEST, write, "packing", f"{total} images")


def _with_validation(splits: Splits) -> dict[str, list[Example]]:
  """Both splits, shuffled: their beginnings must hold all classes."""

  def digest(example: Example) -> bytes:
    return hashlib.sha256(example.key.encode()).digest()

  train = list(splits[TRAIN])
  validation = list(splits.get(VALIDATION) or splits.get(TEST) or [])
  if not validation:
    held_out = [digest(x)[-1] % _HELD_OUT_ONE_IN == 0 for x in train]
    validation = [x for x, held in zip(train, held_out, strict=True) if held]
    train = [x for x, held in zip(train, held_out, strict=True) if not held]
  if not train or not validation:
    raise UserError(f"{len(train) + len(validation)} images are too few to train and validate on")
  return {TRAIN: sorted(train, key=digest), VALIDATION: sorted(validation, key=digest)}


def _pack(folder: Path, names: Sequence[str], splits: Mapping[str, Sequence[Example]]) -> None:
  first = next(iter(splits.values()))[0]
  shape = first.load()[0].shape
  if shape[0] != shape[1]:
    raise UserError(f"{first.name} is {_size(shape)}, and images must be square: {_RESIZE}")
  digest = hashlib.sha256(json.dumps(list(names)).encode())
  for split, examples in splits.items():
    images = np.lib.format.open_memmap(
      folder / f"{split}.images.npy", "w+", np.uint8, (len(examples), *shape)
    )
    labels = np.empty(len(examples), np.int32)
    for i, example in enumerate(examples):
      image, labels[i] = example.load()
      if image.shape != shape:
        raise UserError(
          f"{example.name} is {_size(image.shape)}, but {first.name} {_size(shape)}: {_RESIZE}"
        )
      images[i] = image
      digest.update(image.tobytes())
    images.flush()
    np.save(folder / f"{split}.labels.npy", labels)
    digest.update(labels.tobytes())
  facts = {"fingerprint": digest.hexdigest()[:16], "classes": list(names), "size": shape[0]}
  (folder / MANIFEST).write_text(json.dumps(facts))


def _size(shape: Sequence[int]) -> str:
  return f"{shape[1]} x {shape[0]} pixels"


class Images:
  """The images of a split (Rows in packing.py); pickled as its name."""

  def __init__(self, folder: Path, split: str, classes: int):
    self._place = folder, split, classes
    try:
      self._images_NxSxSx3 = np.load(folder / f"{split}.images.npy", mmap_mode="r")
      self._labels_N = np.load(folder / f"{split}.labels.npy") % classes
    except (OSError, ValueError, EOFError) as e:
      raise UserError(
        f"{folder} is damaged ({first_line(e)}): delete it, and it will be made again"
      ) from e

  def __reduce__(self):
    return Images, self._place

  def __len__(self) -> int:
    return len(self._labels_N)

  def batch(self, rows: Sequence[int]) -> Batch:
    labels_BxL = self._labels_N[rows][:, None]
    weights_BxL = np.ones(labels_BxL.shape, np.float32)
    return Batch(np.asarray(self._images_NxSxSx3[rows]), labels_BxL, weights_BxL)


class ImageSource:
  """A Source that reads packed images."""

  weights = None

  def __init__(self, folder: Path, classes: int = 0):
    """`classes`: into how many those of the data are merged; 0 = as they are."""
    facts = json.loads((folder / MANIFEST).read_text())
    names, self.image_size = facts["classes"], facts["size"]
    need(
      not classes or 2 <= classes <= len(names),
      f"data.classes={classes} must lie between 2 and the {len(names)} that there are, or be 0",
    )
    self.outputs, self.fingerprint = classes or len(names), facts["fingerprint"]
    meaning = json.dumps([names, self.image_size, self.outputs])
    self.coding = hashlib.sha256(meaning.encode()).hexdigest()
    self._train, self._validation = (
      Images(folder, split, self.outputs) for split in (TRAIN, VALIDATION)
    )

  def check_length(self, *, L: int, batch_size: int, steps: int, repeat: bool) -> None:
    if steps * batch_size > len(self._train) and not repeat:
      raise UserError(
        f"there are {len(self._train)} training images, but {steps} steps of {batch_size} were "
        "asked for; train for fewer steps, add more images, or repeat them with "
        "--config.data.repeat=True"
      )

  def train_stream(self, options: StreamOptions) -> StoreStream:
    return StoreStream(HostBatches(self._train, options), self.fingerprint)

  def independent_rows(self, L: int) -> int:
    return len(self._train)

  def validation(
    self, *, L: int, rows: int, mask_documents: bool, eval_rows: str = "packed"
  ) -> EvalSet:
    """The first `rows` images, or all."""
    batch = self._validation.batch(range(min(rows, len(self._validation))))
    return EvalSet(batch, bytes=0, documents=0)
