"""Reads documents from files: JSON lines, Parquet, text and TFRecord, plain or gzipped.

In two steps, so that one process can feed many: `pieces` divides a file into sequences of raw
records without parsing them, which is cheap, and `documents` parses such a piece. Anything wrong
with a record becomes a Problem with file and line; the caller decides what to do about it.
"""

import gzip
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from etils import epath

from nanosam.data.preparation import tfrecord
from nanosam.system.errors import UsageError, first_line

MAX_DOCUMENT_BYTES = 64 << 20  # raw
PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 18  # must not change the pieces, since these decide the shards
_FRAME = struct.Struct("<I")
_NULL = 0xFFFFFFFF
_TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB; split the document"

_KINDS = {
  "json": r"\.(json|jsonl|ndjson)(\.gz)?",
  "parquet": r"\.parquet",
  "text": r"\.txt(\.gz)?",
  "tfrecord": r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?",
}


class Problem(NamedTuple):
  path: str
  number: int  # of the line, row or record, from 1; 0 for the file as a whole
  reason: str

  def __str__(self) -> str:
    return f"{self.path}{f':{self.number}' if self.number else ''}: {self.reason}"


class Piece(NamedTuple):
  """Consecutive raw records of one file."""

  path: str
  first: int  # number of its first record, from 1
  data: bytes
  read: int  # bytes of the (compressed) file read so far


class Document(NamedTuple):
  number: int
  text: str
  utf8: bytes


def kind_of(path: str) -> str:
  for kind, suffix in _KINDS.items():
    if re.search(f"{suffix}$", path):
      return kind
  raise UsageError(
    f"{path}: unknown kind of file; known are .json, .jsonl, .txt and .tfrecord (also .gz) and "
    ".parquet"
  )


def pieces(path: str, text_field: str, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece | Problem]:
  """Divides a file into pieces of about `piece_bytes`; a Problem may end it early."""
  kind = kind_of(path)
  try:
    with epath.Path(path).open("rb") as stored:
      if kind == "parquet":
        yield from _parquet_pieces(path, _Frames(path, stored, piece_bytes), stored, text_field)
        return
      file: Any = gzip.GzipFile(fileobj=stored) if path.endswith(".gz") else stored
      if kind == "json":
        yield from _line_pieces(path, file, stored, piece_bytes)
      else:
        split = _whole_file if kind == "text" else _record_pieces
        yield from split(path, file, _Frames(path, stored, piece_bytes))
  except OSError as e:  # from opening it; later errors are caught where the line is known
    yield Problem(path, 0, f"cannot be read: {e.strerror or e}")


def documents(piece: Piece, text_field: str) -> Iterator[Document | Problem]:
  """Parses the records of a piece."""
  kind = kind_of(piece.path)
  parse = {"json": _json_texts, "tfrecord": _example_texts}.get(kind, _framed_texts)
  for number, text in parse(piece, text_field):
    if isinstance(text, str):
      yield _checked(piece.path, number, text)
    else:
      yield Problem(piece.path, number, text.reason)


class _Bad(NamedTuple):
  reason: str


def _checked(path: str, number: int, text: str) -> Document | Problem:
  if not text or text.isspace():
    return Problem(path, number, "empty document")
  try:
    return Document(number, text, text.encode())
  except UnicodeEncodeError as e:  # JSON can contain half of a surrogate pair
    return Problem(path, number, f"not valid Unicode: {e.reason}")


# ---- Lines ---------------------------------------------------------------------------------------


def _blocks(file: IO[bytes]) -> Iterator[bytes | _Bad]:
  """The bytes of a file; an error comes after everything that could be read."""
  read = getattr(file, "read1", file.read)  # read() would lose what precedes an error
  while True:
    try:
      block = read(_READ_BYTES)
    except (OSError, EOFError, zlib.error) as e:
      yield _Bad(f"cannot be read further: {e}")
      return
    if not block:
      return
    yield block


def _line_pieces(
  path: str, file: IO[bytes], stored: IO[bytes], piece_bytes: int
) -> Iterator[Piece | Problem]:
  """A piece ends with the line that brings it to `piece_bytes`."""
  first, buffer, skipping = 1, bytearray(), False

  def take(end: int) -> Iterator[Piece]:
    nonlocal first
    if end:
      with memoryview(buffer) as view:
        data = bytes(view[:end])
      del buffer[:end]
      yield Piece(path, first, data, stored.tell())
      first += data.count(b"\n")

  for block in _blocks(file):
    if isinstance(block, _Bad):
      yield from take(buffer.rfind(b"\n") + 1)  # The last line may be incomplete.
      yield Problem(path, first, block.reason)
      return
    if skipping:
      end = block.find(b"\n") + 1
      if not end:
        continue
      block, skipping, first = block[end:], False, first + 1
    searched = len(buffer)
    buffer += block
    while (end := buffer.find(b"\n", max(piece_bytes - 1, searched)) + 1) > 0:
      yield from take(end)
      searched = 0
    if len(buffer) > MAX_DOCUMENT_BYTES + piece_bytes:  # an endless line
      yield from take(buffer.rfind(b"\n") + 1)
      yield Problem(path, first, _TOO_LONG)
      skipping = True
      buffer.clear()
  yield from take(len(buffer))


def _json_texts(piece: Piece, text_field: str) -> Iterator[tuple[int, str | _Bad]]:
  for number, line in enumerate(piece.data.split(b"\n"), piece.first):
    if number == 1:
      line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark
    if line.strip():
      yield number, _json_text(line, text_field)


def _json_text(line: bytes, text_field: str) -> str | _Bad:
  if len(line) > MAX_DOCUMENT_BYTES:
    return _Bad(_TOO_LONG)
  try:
    record = json.loads(line.decode())
  except UnicodeDecodeError as e:
    return _Bad(f"invalid UTF-8 at byte {e.start} of the line")
  except (ValueError, RecursionError) as e:
    return _Bad(f"invalid JSON: {e}")
  if not isinstance(record, dict):
    return _Bad("not a JSON object; write one object per line")
  value = record.get(text_field)
  if isinstance(value, str):
    return value
  if value is None:
    return _no_text(text_field, record)
  return _Bad(f"field {text_field!r} is not text but {type(value).__name__}")


def _no_text(text_field: str, fields: Iterable[str]) -> _Bad:
  return _Bad(f"no text in field {text_field!r}; it has {', '.join(fields) or 'none'}")


# ---- Framed records: length and bytes ------------------------------------------------------------


class _Frames:
  """Collects records into pieces; each record follows its length."""

  def __init__(self, path: str, stored: IO[bytes], piece_bytes: int):
    self._path, self._stored, self._piece_bytes = path, stored, piece_bytes
    self._buffer = bytearray()
    self._first = 1
    self.number = 0  # of the last record

  def add(self, record: bytes | None) -> Iterator[Piece]:
    self.number += 1
    self._buffer += _FRAME.pack(_NULL if record is None else len(record)) + (record or b"")
    if len(self._buffer) >= self._piece_bytes:
      yield from self.flush()

  def skip(self) -> Iterator[Piece]:
    """Leaves out one record."""
    yield from self.flush()
    self.number += 1
    self._first += 1

  def flush(self) -> Iterator[Piece]:
    if self._buffer:
      yield Piece(self._path, self._first, bytes(self._buffer), self._stored.tell())
    self._buffer, self._first = bytearray(), self.number + 1


def _unframed(piece: Piece) -> Iterator[tuple[int, bytes | None]]:
  at, number = 0, piece.first
  while at < len(piece.data):
    (length,) = _FRAME.unpack_from(piece.data, at)
    at += _FRAME.size
    if length == _NULL:
      yield number, None
    else:
      yield number, piece.data[at : at + length]
      at += length
    number += 1


def _framed_texts(piece: Piece, text_field: str) -> Iterator[tuple[int, str | _Bad]]:
  for number, record in _unframed(piece):
    null = _Bad(f"no text in field {text_field!r}")
    yield number, null if record is None else _decoded(record)


def _decoded(document: bytes) -> str | _Bad:
  try:
    return document.decode()
  except UnicodeDecodeError as e:
    return _Bad(f"invalid UTF-8 at byte {e.start} of the document")


def _whole_file(path: str, file: IO[bytes], frames: _Frames) -> Iterator[Piece | Problem]:
  """A text file is one document."""
  data = bytearray()
  for block in _blocks(file):
    if isinstance(block, _Bad):
      yield Problem(path, 1, block.reason)
      return
    data += block
    if len(data) > MAX_DOCUMENT_BYTES:
      yield Problem(path, 1, f"{_TOO_LONG}, or write one JSON object per line")
      return
  yield from frames.add(bytes(data))
  yield from frames.flush()


def _parquet_pieces(
  path: str, frames: _Frames, stored: IO[bytes], text_field: str
) -> Iterator[Piece | Problem]:
  import pyarrow
  from pyarrow import parquet

  try:
    # Without pre_buffer a row group, which may exceed memory, is read page by page. A page is held
    # three times; pyarrow writes 1024 rows to one, so a corpus of 400 kB books takes 1.2 GB.
    file = parquet.ParquetFile(stored, pre_buffer=False, buffer_size=PIECE_BYTES)
    columns = [file.schema.column(i).path for i in range(len(file.schema))]
    if text_field not in columns:
      yield Problem(path, 0, f"no column {text_field!r}; it has {', '.join(columns)}")
      return
    for record in _parquet_values(file, text_field, columns.index(text_field)):
      if record is not None and len(record) > MAX_DOCUMENT_BYTES:
        yield from frames.skip()
        yield Problem(path, frames.number, _TOO_LONG)
      else:
        yield from frames.add(record)
    yield from frames.flush()
  except (pyarrow.ArrowException, OSError) as e:
    yield from frames.flush()
    yield Problem(path, frames.number + 1, f"cannot be read as Parquet: {first_line(e)}")


def _parquet_values(file: Any, text_field: str, index: int) -> Iterator[bytes | None]:
  """Row by row, in batches small enough for rows of any size."""
  import pyarrow

  for i in range(file.num_row_groups):
    group = file.metadata.row_group(i)
    row_bytes = group.column(index).total_uncompressed_size // max(1, group.num_rows)
    rows = min(1024, max(1, PIECE_BYTES // max(1, row_bytes)))
    for batch in file.iter_batches(rows, row_groups=[i], columns=[text_field], use_threads=False):
      for value in batch.column(0).cast(pyarrow.large_binary()):
        yield value.as_py()


def _record_pieces(path: str, file: IO[bytes], frames: _Frames) -> Iterator[Piece | Problem]:
  try:
    for data, crc in tfrecord.frames(file, MAX_DOCUMENT_BYTES):
      if data is None:
        yield from frames.skip()
        yield Problem(path, frames.number, _TOO_LONG)
      else:
        yield from frames.add(data + crc)
    yield from frames.flush()
  except (tfrecord.DamagedRecord, OSError, EOFError, zlib.error) as e:
    yield from frames.flush()
    yield Problem(path, frames.number + 1, f"cannot be read further: {first_line(e)}")


def _example_texts(piece: Piece, text_field: str) -> Iterator[tuple[int, str | _Bad]]:
  for number, record in _unframed(piece):
    assert record is not None
    example, crc = record[: -tfrecord.CRC_BYTES], record[-tfrecord.CRC_BYTES :]
    if tfrecord.masked_crc32c(example) != crc:
      yield number, _Bad("the record's checksum does not match")
    else:
      yield number, _example_text(example, text_field)


def _example_text(example: bytes, text_field: str) -> str | _Bad:
  try:
    features = tfrecord.example_features(example)
  except (ValueError, UnicodeDecodeError) as e:
    return _Bad(f"not a tf.Example: {e}")
  values = features.get(text_field)
  return _decoded(values[0]) if values and len(values) == 1 else _no_text(text_field, features)
