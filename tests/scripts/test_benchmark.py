"""The data benchmark's rows are complete."""

import json

import pytest
from helpers.scripts import load_script

from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.errors import UsageError

TEXTS = [f"Document {i} says: {'word ' * (i % 23)}and café {i * i}.\n" for i in range(300)]
benchmark = load_script("scripts/benchmark.py")


def test_rows_of_data(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(benchmark, "BATCHES", {"tokens": 2, "tfds": 1})
  monkeypatch.setattr(benchmark, "BATCH_SIZE", 4)
  (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
  (tmp_path / "t.model").write_bytes(train_tokenizer(TEXTS, 320).model_bytes)
  files = [f"--input={tmp_path}/a.jsonl", f"--tokenizer={tmp_path}/t.model"]
  benchmark.main(["", "data", *files, "--repeats=1", "--workers=1", "--json"])
  rows = json.loads(capsys.readouterr().out)
  names = ["sentencepiece", "prepare", "tokens", "tokens, 1 workers", "tfds", "tfds, 1 workers"]
  assert [row["name"] for row in rows] == names
  assert rows[0]["ratio"] == 1
  assert rows[1]["peak_bytes"] > 20 << 20
  assert all(row["tokens_per_sec"] > 0 for row in rows)
  with pytest.raises(UsageError, match="go together"):
    benchmark.main(["", "data", "--input=x"])


@pytest.mark.full
def test_data_of_the_embedded_corpus(capsys):
  benchmark.main(["", "data", "--repeats=1"])
  said = capsys.readouterr().out
  assert "MB/s of text" in said
  assert "MiB at most" in said
