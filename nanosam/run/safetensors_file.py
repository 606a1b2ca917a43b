"""A .safetensors file, written one tensor at a time.

The format is a JSON header (of a length that the first eight bytes hold) and the tensors' bytes in
its order. The library's own writer wants all tensors at once.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

_ALIGNMENT = 8


def write_safetensors(
  path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], values: Iterator[np.ndarray]
) -> None:
  """`values` in fp32, in the order of `shapes`; only the one that is written is held."""
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
  end = 0
  for name, shape in shapes.items():
    start, end = end, end + 4 * math.prod(shape)
    header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with path.open("wb") as f:
    f.write(len(text).to_bytes(8, "little") + text)
    for name, shape in shapes.items():
      tensor = next(values)
      if tensor.shape != shape or tensor.dtype != np.float32:
        raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}, not fp32{list(shape)}")
      f.write(np.ascontiguousarray(tensor, "<f4").data)
      del tensor  # before the next one is made
    f.flush()
    os.fsync(f.fileno())


def read_shapes(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
  """As the safetensors library sees the file, which it checks when opening."""
  from safetensors import safe_open

  with safe_open(path, "np") as f:
    return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}
