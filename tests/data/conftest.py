"""A small corpus: its files, and the store that the command makes of them."""

import json

import pytest
from helpers.corpus import TRAIN, VALIDATION, arguments, start, write_lines

from nanosam.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """Two gzipped files, one plain, one for validation; and a tokenizer."""
  folder = tmp_path_factory.mktemp("inputs")
  for i, part in enumerate((TRAIN[:150], TRAIN[150:300], TRAIN[300:])):
    write_lines(folder / f"train-{i}.json{'.gz' if i < 2 else ''}", part)
  write_lines(folder / "validation.json.gz", VALIDATION)
  (folder / "t.model").write_bytes(train_tokenizer(TRAIN[:50], 400).model_bytes)
  return folder


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory):
  """Made by the command itself, in a process that tells what it imported."""
  out = tmp_path_factory.mktemp("out") / "store"
  code = """
import json, sys
from nanosam.data import prepare
prepare.main(["", *sys.argv[1:]])
print(json.dumps(sorted(sys.modules)))
"""
  process = start(*arguments(inputs, out), code=code)
  output, err = process.communicate()
  assert process.returncode == 0, err
  *said, modules = output.splitlines()
  return out, said, json.loads(modules)
