"""Documents out of files, and whatever is wrong with one named by file and line."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from helpers.tfrecords import frame
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from nanosam.data.preparation import formats, tfrecord
from nanosam.data.preparation.formats import Document, Problem
from nanosam.system.errors import UsageError

TEXTS = [f"Document {i}: café, 漢字 😀\nsecond line {'word ' * (i % 50)}" for i in range(300)]


def read(path, text_field="text", piece_bytes=formats.PIECE_BYTES, **more):
  """(documents by number, problems)"""
  items: list[Document | Problem] = []
  for piece in formats.pieces(str(path), text_field, piece_bytes, **more):
    items += [piece] if isinstance(piece, Problem) else formats.documents(piece, text_field)
  problems = [i for i in items if isinstance(i, Problem)]
  return {i.number: i.text for i in items if isinstance(i, Document)}, problems


def json_lines(texts, field="text"):
  return "".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)).encode()


def records(texts, field="text"):
  return b"".join(frame(tfrecord.text_example(field, t.encode())) for t in texts)


def write(path: Path, texts) -> Path:
  if path.suffix == ".parquet":
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=70)
    return path
  data = records(texts) if "tfrecord" in path.name else json_lines(texts)
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize(
  "name",
  ["a.json", "a.jsonl.gz", "a.parquet", "a.tfrecord.gz", "c4-train.tfrecord-00001-of-00004"],
)
def test_every_format_gives_the_same_documents(tmp_path, name, piece_bytes):
  documents, problems = read(write(tmp_path / name, TEXTS), piece_bytes=piece_bytes)
  assert documents == dict(enumerate(TEXTS, 1))
  assert not problems


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, name):
  text = "\n\n".join(TEXTS)
  data = text.encode()
  (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
  assert read(tmp_path / name) == ({1: text}, [])


def test_pieces_do_not_depend_on_buffering(tmp_path, monkeypatch):
  """They decide the shards, so that the same input must give the same pieces."""
  path = write(tmp_path / "a.json", TEXTS)
  found = []
  for size in (10, 999, 1 << 18):
    monkeypatch.setattr(formats, "_READ_BYTES", size)
    found.append([(p.first, p.data) for p in formats.pieces(str(path), "text", 5000)])
  assert found[0] == found[1] == found[2]
  assert len(found[0]) > 3
  assert b"".join(data for _, data in found[0]) == path.read_bytes()


def test_json_details(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(
    b'\xef\xbb\xbf{"text": "after a byte-order mark"}\r\n\n  \n{"text": "blank lines before"}'
  )
  assert read(path) == ({1: "after a byte-order mark", 4: "blank lines before"}, [])


def test_unknown_kind_lists_the_known(tmp_path):
  with pytest.raises(UsageError, match=r"a\.csv: unknown kind of file; known are \.json"):
    formats.kind_of("a.csv")


@pytest.mark.parametrize(
  "line, reason",
  [
    (b'{"text": "cut', "invalid JSON"),
    (b"[1, 2]", "not a JSON object"),
    (
      b'{"body": "x", "url": "y.z", "n": 1234}',
      "no text in field 'text'; it has body, url, n: try --text_field=url",
    ),
    (b'{"text": null}', "no text in field 'text'"),
    (b'{"text": 5}', "not text but int"),
    (b'{"text": ""}', "empty document"),
    (b'{"text": " \\n\\t"}', "empty document"),
    (b'{"text": "\xff\xfe"}', "invalid UTF-8 at byte 10"),
    (b'{"text": "\\ud800"}', "not valid Unicode"),
    (b"[" * 100_000, "invalid JSON"),
  ],
)
def test_bad_json_lines_are_named_and_the_rest_is_read(tmp_path, line, reason):
  path = tmp_path / "a.json"
  path.write_bytes(json_lines(TEXTS[:2]) + line + b"\n" + json_lines(TEXTS[2:3]))
  documents, problems = read(path)
  assert list(documents) == [1, 2, 4]
  (problem,) = problems
  assert str(problem).startswith(f"{path}:3: ")
  assert reason in problem.reason


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
  monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 2000)
  monkeypatch.setattr(formats, "_READ_BYTES", 100)
  path = tmp_path / "a.json"
  for length in (1900, 2100, 2500, 5000, 50_000):
    path.write_bytes(json_lines(["a", "b", "x" * length, "c", "d"]))
    documents, problems = read(path, piece_bytes=300)
    if length < 2000:
      assert list(documents) == [1, 2, 3, 4, 5]
    else:
      assert list(documents) == [1, 2, 4, 5]
      assert [(p.number, p.reason[:11]) for p in problems] == [(3, "longer than")]


@pytest.mark.parametrize("name", ["a.json.gz", "a.tfrecord.gz"])
def test_broken_gzip_keeps_what_precedes_the_damage(tmp_path, name):
  rng = np.random.default_rng(0)
  texts = ["".join(map(chr, rng.integers(97, 122, 3000))) for _ in range(300)]
  path = write(tmp_path / name, texts)
  whole = path.read_bytes()
  flipped = bytearray(whole)
  flipped[-6] ^= 1  # in the checksum at the end
  for data, fewest in ((whole[: len(whole) // 2], 100), (bytes(flipped), 299)):
    path.write_bytes(data)
    documents, (problem,) = read(path)
    assert len(documents) >= fewest
    assert documents == dict(enumerate(texts[: len(documents)], 1))
    assert problem.path == str(path)
    assert problem.number == len(documents) + 1
    assert "cannot be read further" in problem.reason
  path.write_bytes(b"not gzip at all")
  assert read(path)[1][0].number == 1


def test_missing_file_is_a_problem_of_the_file(tmp_path):
  _, (problem,) = read(tmp_path / "none.json")
  assert str(problem) == f"{tmp_path}/none.json: cannot be read: No such file or directory"


def test_damaged_tfrecords(tmp_path):
  path = tmp_path / "a.tfrecord"
  good = [frame(tfrecord.text_example("text", t.encode())) for t in TEXTS[:4]]
  flipped = bytearray(good[1])
  flipped[40] ^= 1
  numbers = frame(b"\x0a\x0e\x0a\x0c\x0a\x04text\x12\x04\x1a\x02\x08\x05")
  path.write_bytes(
    b"".join(
      (
        good[0],
        bytes(flipped),
        records(["x"], field="body"),
        frame(b"\xff" * 9),
        numbers,
        good[2],
        good[3][:-9],
      )
    )
  )
  documents, problems = read(path)
  assert documents == {1: TEXTS[0], 6: TEXTS[2]}
  assert [(p.number, p.reason) for p in problems] == [
    (2, "the record's checksum does not match"),
    (3, "no text in field 'text'; it has body: try --text_field=body"),
    (4, "not a tf.Example: it cannot be parsed"),
    (5, "no text in field 'text'; it has text"),
    (7, "cannot be read further: the file ends within a record"),
  ]


def test_a_tfrecord_whose_length_is_damaged_ends_there(tmp_path):
  path = tmp_path / "a.tfrecord"
  data = bytearray(records(TEXTS[:3]))
  data[1] ^= 0xFF
  path.write_bytes(data)
  documents, (problem,) = read(path)
  assert not documents
  assert problem.number == 1
  assert "length does not match" in problem.reason


def test_a_tfrecord_that_is_too_long_is_skipped(tmp_path, monkeypatch):
  monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 500)
  path = tmp_path / "a.tfrecord"
  path.write_bytes(records(["a", "x" * 600, "b"]))
  documents, (problem,) = read(path)
  assert documents == {1: "a", 3: "b"}
  assert problem.number == 2


def test_bad_parquet(tmp_path, monkeypatch):
  path = tmp_path / "a.parquet"
  pq.write_table(pa.table({"text": ["a", None, "", "b" * 600], "n": [1, 2, 3, 4]}), path)
  monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 500)
  documents, problems = read(path)
  assert documents == {1: "a"}
  assert {p.number: p.reason for p in problems} == {
    2: "no text in field 'text'",
    3: "empty document",
    4: formats._TOO_LONG,
  }
  assert read(path, "body")[1] == [
    Problem(str(path), 0, "no column 'body'; it has text, n: try --text_field=text")
  ]
  assert "cannot be read as Parquet" in read(path, "n")[1][0].reason
  path.write_bytes(path.read_bytes()[:-20])
  assert "cannot be read as Parquet" in read(path)[1][0].reason


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_pages_of_any_kind(tmp_path, version, compression, dictionary):
  path = tmp_path / "a.parquet"
  texts = [f"{i:05}" * 200 for i in range(3000)]
  options = dict(
    data_page_version=version,
    compression=compression,
    use_dictionary=dictionary,
    dictionary_pagesize_limit=100_000,
    write_statistics=True,
    write_page_checksum=True,
    write_batch_size=10,
  )
  for size in (100_000, 1_000_000):
    pq.write_table(pa.table({"text": texts}), path, data_page_size=size, **options)
    documents, problems = read(path)
    assert list(documents.values()) == texts and not problems


@pytest.mark.full
def test_parquet_of_books_in_bounded_memory(tmp_path):
  """pyarrow's defaults put 1024 rows on a page, whatever their size: here 150 MiB."""
  path = tmp_path / "a.parquet"
  books = [f"Book {i}. {'word ' * 30_000}" for i in range(2100)]
  pq.write_table(pa.table({"text": books}), path)
  code = """
import re, sys
from nanosam.data.preparation import formats
found = [len(p.data) for p in formats.pieces(sys.argv[1], "text")]
print(sum(found), re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""
  done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
  found, peak_kib = map(int, done.stdout.split())
  assert found == sum(len(b) + 4 for b in books)
  assert peak_kib < 700 << 10


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
  "border, text, expected",
  [
    ("line", "a b\n\n  c\r\nd", ["a b", "  c", "d"]),
    ("blank_line", "\n\na\nb\n \t\n\n\nc\r\n\r\nd\n\n", ["a\nb", "c", "d"]),
    ("<|end|>", "<|end|>a\n<|end|>\nb <|en d<|end|><|end|>", ["a", "b <|en d"]),
    ("line", "\ufeffa\nb", ["a", "b"]),
    ("line", "\n \n", []),
  ],
)
def test_borders_of_text(tmp_path, monkeypatch, read_bytes, border, text, expected):
  """However the file is read, and in pieces of any size."""
  monkeypatch.setattr(formats, "_READ_BYTES", read_bytes)
  path = tmp_path / "a.txt.gz"
  path.write_bytes(gzip.compress(text.encode()))
  for piece_bytes in (1, 1000):
    documents, problems = read(path, piece_bytes=piece_bytes, border=border)
    assert list(documents.values()) == expected and not problems
    assert list(documents) == list(range(1, len(expected) + 1))


def test_a_document_between_borders_may_be_too_long(tmp_path, monkeypatch):
  monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 100)
  monkeypatch.setattr(formats, "_READ_BYTES", 30)
  for long in (101, 120, 1000):
    (tmp_path / "a.txt").write_text(f"a<|>{'x' * long}<|>b<|>c")
    documents, problems = read(tmp_path / "a.txt", border="<|>")
    assert documents == {1: "a", 3: "b", 4: "c"}
    assert problems == [Problem(str(tmp_path / "a.txt"), 2, formats._TOO_LONG)]


def test_invalid_utf8_in_text(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"abc\xff")
  assert read(tmp_path / "a.txt")[1][0].reason == "invalid UTF-8 at byte 3 of the document"


# ---- TFRecord ------------------------------------------------------------------------------------


def test_crc32c_known_answers():  # RFC 3720, appendix B.4, and the customary check value
  data = [b"123456789", bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1)), b""]
  expected = [0xE3069283, 0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0]
  masked = [int.from_bytes(tfrecord.masked_crc32c(d), "little") for d in data]
  rotated = [(m - 0xA282EAD8) % 2**32 for m in masked]
  assert [(r >> 17 | r << 15) % 2**32 for r in rotated] == expected


def test_checksums_are_those_of_tensorboard_at_every_length():
  rng = np.random.default_rng(0)
  for n in (*range(70), 127, 128, 129, 191, 193, 1000, 4095, 40_001):
    data = rng.bytes(n)
    expected = pywrap_tensorflow.masked_crc32c(data)
    assert int.from_bytes(tfrecord.masked_crc32c(data), "little") == expected


def test_examples_are_those_of_tfds():
  features = tfds.features.FeaturesDict(
    {"text": tfds.features.Text(), "n": np.int64, "xs": tfds.features.Sequence(np.float32)}
  )
  record = features.serialize_example({"text": "café" * 100, "n": 3, "xs": [1.0, 2.0]})
  found = tfrecord.example_features(record)
  assert found == {"text": [("café" * 100).encode()], "n": None, "xs": None}
  alone = tfds.features.FeaturesDict({"text": tfds.features.Text()})
  mine = tfrecord.text_example("text", "café".encode())
  assert mine == alone.serialize_example({"text": "café"})
  assert alone.deserialize_example_np(mine) == {"text": "café".encode()}


def test_frames_are_those_of_tensorboard(tmp_path):
  """Another reader of the format agrees with our writer."""
  (tmp_path / "x").write_bytes(records(TEXTS[:3]))
  reader = pywrap_tensorflow.PyRecordReader_New(str(tmp_path / "x"))
  for text in TEXTS[:3]:
    reader.GetNext()
    assert reader.record() == tfrecord.text_example("text", text.encode())
