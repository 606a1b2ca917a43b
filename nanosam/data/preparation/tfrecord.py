"""TFRecord files and tf.Example records, without TensorFlow.

A record in a file is: length (8 bytes), masked CRC of the length (4), data, masked CRC of the data
(4), all little-endian.
"""

import os
from collections.abc import Iterator
from typing import IO, Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

CRC_BYTES = 4
_LENGTH_BYTES = 8

# ---- Frames --------------------------------------------------------------------------------------


class DamagedRecord(ValueError):
  """The rest of the file is unreadable: nobody knows where the next record begins."""


def masked_crc32c(data: bytes) -> bytes:
  """The checksum that a TFRecord file stores: masked, because data may contain CRCs themselves."""
  crc = google_crc32c.value(data)
  masked = (crc >> 15 | crc << 17) + 0xA282EAD8
  return (masked & 0xFFFFFFFF).to_bytes(CRC_BYTES, "little")


def frames(file: IO[bytes], max_bytes: int) -> Iterator[tuple[bytes | None, bytes]]:
  """Data and stored checksum of each record; None instead of data above `max_bytes`."""
  while head := file.read(_LENGTH_BYTES):
    crc = _read(file, CRC_BYTES)
    if masked_crc32c(head) != crc:
      raise DamagedRecord("the checksum of the record's length does not match")
    length = int.from_bytes(head, "little")
    data = None
    if length <= max_bytes:
      data = _read(file, length)
    else:
      file.seek(length, os.SEEK_CUR)
    yield data, _read(file, CRC_BYTES)


def _read(file: IO[bytes], length: int) -> bytes:
  data = file.read(length)
  if len(data) < length:
    raise DamagedRecord("the file ends within a record")
  return data


# ---- tf.Example ----------------------------------------------------------------------------------

# What text needs of tensorflow/core/example/*.proto. Features of numbers are fields of Feature that
# are not named here, and a map is stored as its entries.
_PROTO = """
name: "example.proto"
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
message_type { name: "Features"
  field { name: "entries" number: 1 type: TYPE_MESSAGE type_name: "Entry" label: LABEL_REPEATED } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_BYTES }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" } }
message_type { name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
_Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("Example"))


def example_features(record: bytes) -> dict[str, list[bytes] | None]:
  """The values of each feature by name; None for a feature of numbers."""
  try:
    entries = _Example.FromString(record).features.entries
  except DecodeError as e:
    raise ValueError("it cannot be parsed") from e
  return {
    entry.key.decode(): None
    if entry.value.ByteSize() and not entry.value.HasField("bytes_list")
    else list(entry.value.bytes_list.value)
    for entry in entries
  }


def text_example(name: str, text: bytes) -> bytes:
  """A tf.Example with one bytes feature."""
  entry = {"key": name.encode(), "value": {"bytes_list": {"value": [text]}}}
  return _Example(features={"entries": [entry]}).SerializeToString()
