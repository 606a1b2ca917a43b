"""What W&B has written offline."""

import json
import struct

from wandb.proto import wandb_internal_pb2


def wandb_records(path):
  """W&B's offline file: blocks of 32 KiB that hold (crc, length, kind) framed protobuf records."""
  data = path.read_bytes()
  assert data[:4] == b":W&B"
  position, parts = 7, b""
  while position + 7 <= len(data):
    room = 32768 - position % 32768
    if room < 7:
      position += room
      continue
    _, length, kind = struct.unpack_from("<IHB", data, position)
    parts += data[position + 7 : position + 7 + length]
    position += 7 + length
    if kind in (1, 4):  # a whole record, or the last part of one
      yield wandb_internal_pb2.Record.FromString(parts)
      parts = b""


def of_type(records, name):
  return [getattr(r, name) for r in records if r.WhichOneof("record_type") == name]


def items(record):
  pairs = getattr(record, "item", None) or record.update
  return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in pairs}


def offline_files(workdir):
  return sorted((workdir / "wandb").glob("offline-run-*/run-*.wandb"))


def wandb_exit_code(workdir):
  """What W&B was told at the end of the last offline run."""
  return of_type(wandb_records(offline_files(workdir)[-1]), "exit")[0].exit_code
