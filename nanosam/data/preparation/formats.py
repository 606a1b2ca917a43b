"""Reads documents from files: JSON lines, Parquet, text and TFRecord, plain or gzipped.

In two steps, so that one process can feed many: `pieces` divides a file into sequences of raw
records without parsing them, which is cheap, and `documents` parses such a piece. Anything wrong
with a record becomes a Problem with file and line; the caller decides what to do about it.
"""

import gzip
import itertools
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from etils import epath

from nanosam.data.preparation import tfrecord
from nanosam.system.errors import UsageError, first_line

MAX_DOCUMENT_BYTES = 64 << 20  # raw
PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 18  # must not change the pieces, since these decide the shards
_FRAME = struct.Struct("<I")
_NULL = 0xFFFFFFFF
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB; split the document"
_UNREADABLE = (OSError, EOFError, zlib.error, tfrecord.DamagedRecord)

# What separates documents in .txt; anything else is a marker between them.
WHOLE_FILE = "file"
BORDERS = {"line": rb"\n", "blank_line": rb"\n[ \t\r]*\n"}

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


KNOWN = "known are .json, .jsonl, .txt and .tfrecord (also .gz) and .parquet"


def is_known(path: str) -> bool:
  return any(re.search(f"{suffix}$", path) for suffix in _KINDS.values())


def kind_of(path: str) -> str:
  for kind, suffix in _KINDS.items():
    if re.search(f"{suffix}$", path):
      return kind
  raise UsageError(f"{path}: unknown kind of file; {KNOWN}; rename plain text to .txt")


class BadRecord(Exception):
  """Its text is the reason of a Problem."""


def pieces(
  path: str, text_field: str, piece_bytes: int = PIECE_BYTES, border: str = WHOLE_FILE
) -> Iterator[Piece | Problem]:
  """Divides a file into pieces of about `piece_bytes`; a Problem may end it early.

  `border` is what separates the documents of a text file.
  """
  kind = kind_of(path)
  try:
    with epath.Path(path).open("rb") as stored:
      file: Any = gzip.GzipFile(fileobj=stored) if path.endswith(".gz") else stored
      if kind == "json":
        yield from _line_pieces(path, file, stored, piece_bytes)
      else:
        records = _FRAMED[kind][0](file, border if kind == "text" else text_field)
        yield from _framed_pieces(path, records, stored, piece_bytes)
  except BadRecord as e:
    yield Problem(path, 0, str(e))
  except OSError as e:  # from opening it; later errors are caught where the line is known
    yield Problem(path, 0, f"cannot be read: {e.strerror or e}")


def documents(piece: Piece, text_field: str) -> Iterator[Document | Problem]:
  """Parses the records of a piece."""
  kind = kind_of(piece.path)
  parse: Callable[[Any, str], str] = _json_text if kind == "json" else _FRAMED[kind][1]
  for number, record in _lines(piece) if kind == "json" else _unframed(piece):
    try:
      text = parse(record, text_field)
      if not text or text.isspace():
        raise BadRecord("empty document")
      yield Document(number, text, text.encode())
    except UnicodeEncodeError as e:  # JSON can contain half of a surrogate pair
      yield Problem(piece.path, number, f"not valid Unicode: {e.reason}")
    except BadRecord as e:
      yield Problem(piece.path, number, str(e))


# ---- Lines ---------------------------------------------------------------------------------------


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
  read = getattr(file, "read1", file.read)  # read() would lose what precedes an error
  while block := read(_READ_BYTES):
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

  try:
    for block in _blocks(file):
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
  except _UNREADABLE as e:
    yield from take(buffer.rfind(b"\n") + 1)  # the last line may be incomplete
    yield Problem(path, first, f"cannot be read further: {e}")


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
  for number, line in enumerate(piece.data.split(b"\n"), piece.first):
    if number == 1:
      line = line.removeprefix(_BYTE_ORDER_MARK)
    if line.strip():
      yield number, line


def _json_text(line: bytes, text_field: str) -> str:
  if len(line) > MAX_DOCUMENT_BYTES:
    raise BadRecord(_TOO_LONG)
  try:
    record = json.loads(line.decode())
  except UnicodeDecodeError as e:
    raise BadRecord(f"invalid UTF-8 at byte {e.start} of the line") from e
  except (ValueError, RecursionError) as e:
    raise BadRecord(f"invalid JSON: {e}") from e
  if not isinstance(record, dict):
    raise BadRecord("not a JSON object; write one object per line")
  value = record.get(text_field)
  if value is None:
    raise _no_text(text_field, {k: len(v) if isinstance(v, str) else 0 for k, v in record.items()})
  if not isinstance(value, str):
    raise BadRecord(f"field {text_field!r} is not text but {type(value).__name__}")
  return value


def _no_text(text_field: str, sizes: Mapping[str, int], what: str = "text in field") -> BadRecord:
  """Names all fields, and the one that is probably meant: the longest."""
  message = f"no {what} {text_field!r}; it has {', '.join(sizes) or 'none'}"
  others = {name: size for name, size in sizes.items() if size and name != text_field}
  hint = f": try --text_field={max(others, key=lambda name: others[name])}" if others else ""
  return BadRecord(message + hint)


# ---- Framed records: length and bytes ------------------------------------------------------------

# The records of a file: bytes, None for a row without a value, an error for one that is left out.
_Records = Iterator[bytes | BadRecord | None]


def _framed_pieces(
  path: str, records: _Records, stored: IO[bytes], piece_bytes: int
) -> Iterator[Piece | Problem]:
  """Collects records into pieces; each record follows its length."""
  buffer, first, number = bytearray(), 1, 0

  def take() -> Iterator[Piece]:
    if buffer:
      yield Piece(path, first, bytes(buffer), stored.tell())
      buffer.clear()

  try:
    for number, record in enumerate(records, 1):
      if isinstance(record, BadRecord):
        yield from take()
        yield Problem(path, number, str(record))
        continue
      if not buffer:
        first = number
      buffer += _FRAME.pack(_NULL if record is None else len(record)) + (record or b"")
      if len(buffer) >= piece_bytes:
        yield from take()
    yield from take()
  except _UNREADABLE as e:
    yield from take()
    how = "as Parquet" if kind_of(path) == "parquet" else "further"
    yield Problem(path, number + 1, f"cannot be read {how}: {first_line(e)}")


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


def _text_records(file: IO[bytes], border: str) -> _Records:
  """The documents of a text file; those between two borders without their empty lines."""
  if border == WHOLE_FILE:
    yield from _whole_file(file)
    return
  separator = re.compile(BORDERS.get(border) or re.escape(border.encode()))
  rest, skipping, mark = b"", False, _BYTE_ORDER_MARK
  for block in itertools.chain(_blocks(file), [None]):
    parts = separator.split(rest + (block or b""))
    rest = b"" if block is None else parts.pop()
    for part in parts:
      document = part.removeprefix(mark).strip(b"\r\n")
      if document.strip() and not skipping:
        yield BadRecord(_TOO_LONG) if len(document) > MAX_DOCUMENT_BYTES else document
      skipping, mark = False, b""
    if len(rest) > MAX_DOCUMENT_BYTES and not skipping:
      yield BadRecord(_TOO_LONG)
      skipping = True
    if skipping:
      rest = rest[-len(border.encode()) :]  # of a marker, what may have begun


def _whole_file(file: IO[bytes]) -> _Records:
  data = bytearray()
  for block in _blocks(file):
    data += block
    if len(data) > MAX_DOCUMENT_BYTES:
      yield BadRecord(f"{_TOO_LONG}, or say where one ends: --border=blank_line, line or a marker")
      return
  yield bytes(data)


def _parquet_records(stored: IO[bytes], text_field: str) -> _Records:
  """Row by row, in batches small enough for rows of any size."""
  import pyarrow
  from pyarrow import parquet

  try:
    # Without pre_buffer a row group, which may exceed memory, is read page by page. A page is held
    # three times; pyarrow writes 1024 rows to one, so a corpus of 400 kB books takes 1.2 GB.
    file = parquet.ParquetFile(stored, pre_buffer=False, buffer_size=PIECE_BYTES)
    columns = [file.schema.column(i).path for i in range(len(file.schema))]
    if text_field not in columns:
      groups = [file.metadata.row_group(i) for i in range(min(1, file.num_row_groups))]
      sizes = {
        c: sum(g.column(i).total_uncompressed_size for g in groups) for i, c in enumerate(columns)
      }
      raise _no_text(text_field, sizes, "column")
    for i in range(file.num_row_groups):
      group = file.metadata.row_group(i)
      column_bytes = group.column(columns.index(text_field)).total_uncompressed_size
      rows = min(1024, max(1, PIECE_BYTES // max(1, column_bytes // max(1, group.num_rows))))
      for batch in file.iter_batches(rows, row_groups=[i], columns=[text_field], use_threads=False):
        for value in batch.column(0).cast(pyarrow.large_binary()):
          record = value.as_py()
          too_long = record is not None and len(record) > MAX_DOCUMENT_BYTES
          yield BadRecord(_TOO_LONG) if too_long else record
  except pyarrow.ArrowException as e:
    raise OSError(first_line(e)) from e


def _tf_records(file: IO[bytes], text_field: str) -> _Records:
  for data, crc in tfrecord.frames(file, MAX_DOCUMENT_BYTES):
    yield BadRecord(_TOO_LONG) if data is None else data + crc


def _plain_text(record: bytes | None, text_field: str) -> str:
  if record is None:
    raise BadRecord(f"no text in field {text_field!r}")
  try:
    return record.decode()
  except UnicodeDecodeError as e:
    raise BadRecord(f"invalid UTF-8 at byte {e.start} of the document") from e


def _example_text(record: bytes, text_field: str) -> str:
  example, crc = record[: -tfrecord.CRC_BYTES], record[-tfrecord.CRC_BYTES :]
  if tfrecord.masked_crc32c(example) != crc:
    raise BadRecord("the record's checksum does not match")
  try:
    features = tfrecord.example_features(example)
  except ValueError as e:
    raise BadRecord(f"not a tf.Example: {e}") from e
  values = features.get(text_field)
  if not values or len(values) > 1:
    raise _no_text(text_field, {k: sum(map(len, v or ())) for k, v in features.items()})
  return _plain_text(values[0], text_field)


# By kind of file: its records, and the text of one.
_FRAMED: dict[str, tuple[Callable[[Any, str], _Records], Callable[[Any, str], str]]] = {
  "parquet": (_parquet_records, _plain_text),
  "text": (_text_records, _plain_text),
  "tfrecord": (_tf_records, _example_text),
}
