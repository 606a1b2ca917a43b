"""TFRecord files for tests to read."""

import struct

from nanosam.data.preparation.tfrecord import masked_crc32c


def frame(data: bytes) -> bytes:
  """A record as it stands in a file."""
  length = struct.pack("<Q", len(data))
  length_crc, data_crc = (struct.pack("<I", masked_crc32c(x)) for x in (length, data))
  return length + length_crc + data + data_crc
