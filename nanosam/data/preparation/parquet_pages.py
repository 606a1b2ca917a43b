"""Sizes of a Parquet file's pages, from their headers: what a reader must hold at one time.

pyarrow reads a page whole, and holds it nearly three times (compressed, decoded, as values). Its
metadata do not tell how large pages are, so their headers are read here: structs of Thrift's
compact protocol, of which the first fields matter and the rest is skipped.
"""

from collections.abc import Iterator
from typing import IO, Any

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_UNCOMPRESSED_SIZE, _COMPRESSED_SIZE = 2, 3  # fields of a page header


def largest_page(file: IO[bytes], column: Any) -> int:
  """Bytes, uncompressed, of the largest page of a column chunk (pyarrow's metadata of it)."""
  return max(_page_sizes(file, column), default=0)


def _page_sizes(file: IO[bytes], column: Any) -> Iterator[int]:
  place = column.data_page_offset
  if column.has_dictionary_page:
    place = min(place, column.dictionary_page_offset)
  end = place + column.total_compressed_size
  while place < end:
    file.seek(place)
    header = _struct(file)
    place = file.tell() + header[_COMPRESSED_SIZE]
    yield header[_UNCOMPRESSED_SIZE]


def _struct(file: IO[bytes]) -> dict[int, int]:
  """The integers among a struct's fields, by number."""
  fields: dict[int, int] = {}
  number = 0
  while (head := _byte(file)) & 15 != _STOP:
    number = number + (head >> 4) if head >> 4 else _zigzag(file)
    value = _value(file, head & 15, in_list=False)
    if value is not None:
      fields[number] = value
  return fields


def _value(file: IO[bytes], kind: int, in_list: bool) -> int | None:
  """Reads past a value; integers are returned."""
  if kind in (_TRUE, _FALSE):
    if in_list:
      file.seek(1, 1)  # elsewhere the kind is the value
  elif kind == _BYTE:
    file.seek(1, 1)
  elif kind < _DOUBLE:
    return _zigzag(file)
  elif kind == _DOUBLE:
    file.seek(8, 1)
  elif kind == _BINARY:
    file.seek(_varint(file), 1)
  elif kind in (_LIST, _SET):
    head = _byte(file)
    for _ in range(head >> 4 if head >> 4 < 15 else _varint(file)):
      _value(file, head & 15, in_list=True)
  elif kind == _STRUCT:
    _struct(file)
  else:
    raise OSError(f"a page header with a field of kind {kind}")
  return None


def _byte(file: IO[bytes]) -> int:
  byte = file.read(1)
  if not byte:
    raise OSError("it ends inside a page header")
  return byte[0]


def _varint(file: IO[bytes]) -> int:
  result = shift = 0
  while True:
    byte = _byte(file)
    result |= (byte & 127) << shift
    if byte < 128:
      return result
    shift += 7


def _zigzag(file: IO[bytes]) -> int:
  n = _varint(file)
  return (n >> 1) ^ -(n & 1)
