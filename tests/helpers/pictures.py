"""Folders and TFDS data sets of small images."""

import json
import pathlib

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

CLASSES = ("cat", "dog")


def picture(number, shape=(8, 8, 3)):
  return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def write_folder(root: pathlib.Path, **splits: int) -> str:
  """So many images of each class, in each split; PNG, so that they are read back exactly."""
  for place, (split, count) in enumerate(splits.items()):
    for label, name in enumerate(CLASSES):
      folder = root / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        number = 1000 * place + 100 * label + i
        Image.fromarray(picture(number)).save(folder / f"{i:03}.png")
  return f"images:{root}"


def _field(number, kind, content):
  """A protobuf field: a number, or what has a length."""
  head = bytes([number << 3 | (0 if kind == "int" else 2)])
  return head + (bytes([content]) if kind == "int" else _varint(len(content)) + content)


def _varint(value):
  found = b""
  while value > 127:
    found, value = found + bytes([value & 127 | 128]), value >> 7
  return found + bytes([value])


def _example(image: bytes, label: int) -> bytes:
  """A tf.Example."""
  values = {
    b"image": _field(1, "bytes", _field(1, "bytes", image)),
    b"label": _field(3, "bytes", _field(1, "int", label)),
  }
  entries = [_field(1, "bytes", k) + _field(2, "bytes", v) for k, v in values.items()]
  return _field(1, "bytes", b"".join(_field(1, "bytes", entry) for entry in entries))


def write_tfds(root: pathlib.Path, files: dict[str, list[tuple[pathlib.Path, int]]]) -> str:
  """The images in these files with their labels, as TFDS lays them out in ArrayRecord form."""
  folder = root / "pets" / "1.0.0"
  folder.mkdir(parents=True)
  for split, examples in files.items():
    name = folder / f"pets-{split}.array_record-00000-of-00001"
    writer = ArrayRecordWriter(str(name), "group_size:1")
    for file, label in examples:
      writer.write(_example(file.read_bytes(), label))
    writer.close()
  package = "tensorflow_datasets.core.features"
  features = {
    "image": {
      "pythonClassName": f"{package}.image_feature.Image",
      "image": {
        "shape": {"dimensions": ["-1", "-1", "3"]},
        "dtype": "uint8",
        "encodingFormat": "png",
      },
    },
    "label": {
      "pythonClassName": f"{package}.class_label_feature.ClassLabel",
      "classLabel": {"numClasses": str(len(CLASSES))},
    },
  }
  whole = {
    "pythonClassName": f"{package}.features_dict.FeaturesDict",
    "featuresDict": {"features": features},
  }
  (folder / "features.json").write_text(json.dumps(whole))
  (folder / "label.labels.txt").write_text("\n".join(CLASSES) + "\n")
  template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
  splits = [
    {"name": s, "filepathTemplate": template, "numBytes": "1", "shardLengths": [str(len(x))]}
    for s, x in files.items()
  ]
  info = {"name": "pets", "version": "1.0.0", "fileFormat": "array_record", "splits": splits}
  (folder / "dataset_info.json").write_text(json.dumps(info))
  return f"tfds:{folder}"
