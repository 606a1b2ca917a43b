"""TFRecord files, protobuf messages and tf.Example records, without TensorFlow.

A record in a file is: length (8 bytes), masked CRC of the length (4), data, masked CRC of the data
(4), all little-endian.
"""

from collections.abc import Iterator
from typing import IO

import google_crc32c

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
      _skip(file, length)
    yield data, _read(file, CRC_BYTES)


def _read(file: IO[bytes], length: int) -> bytes:
  data = file.read(length)
  if len(data) < length:
    raise DamagedRecord("the file ends within a record")
  return data


def _skip(file: IO[bytes], length: int) -> None:
  while length > 0:
    length -= len(_read(file, min(length, 1 << 20)))


# ---- Protobuf ------------------------------------------------------------------------------------

_VARINT, _BYTES = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed size


def _varint(n: int) -> bytes:
  out = bytearray()
  while n > 0x7F:
    out.append(n & 0x7F | 0x80)
    n >>= 7
  out.append(n)
  return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
  return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
  """Contents of the length-delimited fields of that number."""
  at = 0
  while at < len(message):
    key, at = _read_varint(message, at)
    wire_type = key & 7
    if wire_type == _BYTES:
      length, at = _read_varint(message, at)
      if at + length > len(message):
        raise ValueError("a field extends past the end of the record")
      if key >> 3 == wanted:
        yield message[at : at + length]
      at += length
    elif wire_type == _VARINT:
      _, at = _read_varint(message, at)
    elif wire_type in _FIXED:
      at += _FIXED[wire_type]
    else:
      raise ValueError(f"wire type {wire_type}")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
  n = shift = 0
  while True:
    if at >= len(message) or shift > 63:
      raise ValueError("an endless number")
    byte = message[at]
    n |= (byte & 0x7F) << shift
    at += 1
    if byte < 0x80:
      return n, at
    shift += 7


# ---- tf.Example ----------------------------------------------------------------------------------
# Example { Features features = 1; }  Features { map<string, Feature> feature = 1; }
# Feature { BytesList | FloatList | Int64List }  BytesList { repeated bytes value = 1; }
# A map entry is a message of key = 1 and value = 2. All of these fields are length-delimited.


def example_features(record: bytes) -> dict[str, list[bytes] | None]:
  """The values of each feature by name; None for a feature of numbers."""
  features: dict[str, list[bytes] | None] = {}
  for entry in _fields(b"".join(_fields(record, 1)), 1):
    name = b"".join(_fields(entry, 1)).decode()
    feature = b"".join(_fields(entry, 2))
    lists = list(_fields(feature, 1))
    features[name] = [v for x in lists for v in _fields(x, 1)] if lists or not feature else None
  return features


def text_example(name: str, text: bytes) -> bytes:
  """A tf.Example with one bytes feature."""
  feature = _field(1, _field(1, text))
  entry = _field(1, name.encode()) + _field(2, feature)
  return _field(1, _field(1, entry))
