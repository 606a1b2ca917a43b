"""TFRecord files for tests to read."""

from nanosam.data.preparation.tfrecord import masked_crc32c


def frame(data: bytes) -> bytes:
  """A record as it stands in a file."""
  length = len(data).to_bytes(8, "little")
  return length + masked_crc32c(length) + data + masked_crc32c(data)
