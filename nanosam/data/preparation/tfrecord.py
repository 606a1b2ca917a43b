"""TFRecord files, protobuf messages and tf.Example records, without TensorFlow.

A record is framed as: length (8 bytes), masked CRC of the length (4), data, masked CRC of the data
(4), all little-endian. The CRC is CRC-32C, which Python's standard library lacks.
"""

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np

_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits reversed
_BLOCK = 64  # bytes whose CRC one lane computes; a multiple of 4
_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")

# ---- CRC-32C -------------------------------------------------------------------------------------
# A CRC is linear over GF(2), and leading zeros do not change it when the register starts at 0. So
# all blocks of all records are computed side by side, then joined in pairs. A step or a jump over
# zeros is a linear map of 32 bits: two tables of 2^16 entries, for the low and the high half.

_Map = tuple[np.ndarray, np.ndarray]


def _linear_map(images_of_bits: Sequence[int]) -> _Map:
  halves = []
  for bits in (images_of_bits[:16], images_of_bits[16:]):
    table = np.zeros(1, np.uint32)
    for image in bits:
      table = np.concatenate([table, table ^ np.uint32(image)])
    halves.append(table)
  return halves[0], halves[1]


def _apply(linear_map: _Map, x: np.ndarray) -> np.ndarray:
  return linear_map[0][x & 0xFFFF] ^ linear_map[1][x >> 16]


@functools.cache
def _skip_zeros(doublings: int) -> _Map:
  """The register's change over 4 * 2^doublings zero bytes."""
  bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
  if doublings:
    half = _skip_zeros(doublings - 1)
    return _linear_map(_apply(half, _apply(half, bits)).tolist())
  for _ in range(32):
    bits = (bits >> 1) ^ np.where(bits & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
  return _linear_map(bits.tolist())


def crc32c(records: Sequence[bytes]) -> list[int]:
  """The checksum of each record; quick for many at once."""
  if not records:
    return []
  lengths = np.asarray([len(r) for r in records])
  blocks_R = np.maximum(1, -(-lengths // _BLOCK))
  ends_R = np.cumsum(blocks_R)
  padded = np.zeros(int(ends_R[-1]) * _BLOCK, np.uint8)
  for record, end in zip(records, (ends_R * _BLOCK).tolist(), strict=True):
    data = np.frombuffer(record, np.uint8)
    padded[end - len(data) : end] = data
    padded[end - len(data) : end][:4] ^= 0xFF  # a register that starts at all ones
  words = padded.view("<u4").reshape(-1, _BLOCK // 4)
  crc = np.zeros(len(words), np.uint32)
  step = _skip_zeros(0)
  for column in words.T:
    crc = _apply(step, crc ^ column)
  crc_R = _join_blocks(crc, blocks_R)
  # Records shorter than the register did not meet all of its ones.
  for i in np.flatnonzero(lengths < 4).tolist():
    crc_R[i] = _crc32c_short(records[i])
  return (crc_R ^ 0xFFFFFFFF).tolist()


def _join_blocks(crc: np.ndarray, blocks_R: np.ndarray) -> np.ndarray:
  """The register after all blocks of each record, from those of its single blocks."""
  doublings = (_BLOCK // 4).bit_length() - 1
  while len(crc) > len(blocks_R):
    pairs_R = -(-blocks_R // 2)
    last_R = np.cumsum(blocks_R) - 1
    # Pairs are counted from the end of each record; an odd first block pairs with zeros.
    first_R = np.cumsum(pairs_R) - pairs_R
    from_end = np.repeat(pairs_R + first_R, pairs_R) - 1 - np.arange(pairs_R.sum())
    right = np.repeat(last_R, pairs_R) - 2 * from_end
    begin = np.repeat(last_R - blocks_R + 1, pairs_R)
    left = np.where(right > begin, crc[right - 1], np.uint32(0))
    crc = _apply(_skip_zeros(doublings), left) ^ crc[right]
    blocks_R = pairs_R
    doublings += 1
  return crc


def _crc32c_short(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
  return crc


def masked(crc: int) -> int:
  """What a TFRecord file stores, so that a CRC over data with CRCs in it stays useful."""
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- Frames --------------------------------------------------------------------------------------


class DamagedRecord(ValueError):
  """The rest of the file cannot be trusted: where the next record begins is unknown."""


def frames(file: IO[bytes], max_bytes: int) -> Iterator[tuple[bytes | None, int]]:
  """(data, stored masked CRC of it) of each record; None for data above `max_bytes`."""
  while header := file.read(_HEADER.size):
    if len(header) < _HEADER.size:
      raise DamagedRecord("the file ends within a record")
    length, length_crc = _HEADER.unpack(header)
    if masked(_crc32c_short(header[:8]) ^ 0xFFFFFFFF) != length_crc:
      raise DamagedRecord("the checksum of the record's length does not match")
    data = _read(file, length, keep=length <= max_bytes)
    tail = file.read(_CRC.size)
    if len(tail) < _CRC.size:
      raise DamagedRecord("the file ends within a record")
    yield data, _CRC.unpack(tail)[0]


def _read(file: IO[bytes], length: int, keep: bool) -> bytes | None:
  if keep:
    data = file.read(length)
    if len(data) < length:
      raise DamagedRecord("the file ends within a record")
    return data
  while length > 0:
    skipped = len(file.read(min(length, 1 << 20)))
    if not skipped:
      raise DamagedRecord("the file ends within a record")
    length -= skipped
  return None


def frame(data: bytes) -> bytes:
  """A record as it stands in a file."""
  length = struct.pack("<Q", len(data))
  length_crc, data_crc = (masked(crc) for crc in crc32c([length, data]))
  return length + _CRC.pack(length_crc) + data + _CRC.pack(data_crc)


# ---- Protobuf ------------------------------------------------------------------------------------

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FIXED = {FIXED64: 8, FIXED32: 4}  # bytes


def varint(n: int) -> bytes:
  out = bytearray()
  while n > 0x7F:
    out.append(n & 0x7F | 0x80)
    n >>= 7
  out.append(n)
  return bytes(out)


def field(number: int, wire_type: int, payload: bytes) -> bytes:
  length = varint(len(payload)) if wire_type == BYTES else b""
  return varint(number << 3 | wire_type) + length + payload


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
  """Contents of the length-delimited fields of that number."""
  at = 0
  while at < len(message):
    key, at = _read_varint(message, at)
    wire_type = key & 7
    if wire_type == BYTES:
      length, at = _read_varint(message, at)
      if at + length > len(message):
        raise ValueError("a field reaches past the end of the record")
      if key >> 3 == wanted:
        yield message[at : at + length]
      at += length
    elif wire_type == VARINT:
      _, at = _read_varint(message, at)
    elif wire_type in _FIXED:
      at += _FIXED[wire_type]
    else:
      raise ValueError(f"wire type {wire_type}")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
  n = shift = 0
  while True:
    if at >= len(message) or shift > 63:
      raise ValueError("a number without end")
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
  """Name to values of each feature; None for one that holds numbers instead of bytes."""
  features: dict[str, list[bytes] | None] = {}
  for entry in _fields(b"".join(_fields(record, 1)), 1):
    name = b"".join(_fields(entry, 1)).decode()
    feature = b"".join(_fields(entry, 2))
    lists = list(_fields(feature, 1))
    features[name] = [v for x in lists for v in _fields(x, 1)] if lists or not feature else None
  return features


def text_example(name: str, text: bytes) -> bytes:
  """A tf.Example of one bytes feature."""
  feature = field(1, BYTES, field(1, BYTES, text))
  entry = field(1, BYTES, name.encode()) + field(2, BYTES, feature)
  return field(1, BYTES, field(1, BYTES, entry))
