"""The benchmarks' rows are complete."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.scripts import load_script
from helpers.toy import close

import nanosam
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


@pytest.mark.full
def test_rows_of_scoring(capsys, cache):
  words = ["--size=mini", "--rounds=1", "--batch_size=4", "--length=32", "--json"]
  benchmark.main(["benchmark.py", "scoring", *words])
  rows = json.loads(capsys.readouterr().out)
  assert [row["name"] for row in rows] == ["evaluate", "scoring"]
  assert rows[0]["speed_ratio"] == 1 and all(row["tokens_per_sec"] > 0 for row in rows)


@pytest.mark.full
def test_rows_of_the_library(capsys):
  benchmark.main(["", "library", "--rounds=1", "--json"])
  rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
  assert [*rows] == ["adamw", "sam", "func_sam", "precond_func_sam"]
  for name in ("sam", "func_sam", "precond_func_sam"):
    assert rows[name]["flops_ratio"] == pytest.approx(2, abs=0.02)
    assert rows[name]["memory_ratio_to_by_hand"] < 1.1


def test_methods_by_hand_are_those_of_the_library():
  params = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(6, 5), (5, 4)])]
  batch = {"x": jax.random.normal(jax.random.key(9), (8, 6)), "y": jnp.arange(8) % 4}
  tx = optax.adam(1e-2)
  state = tx.init(params)
  for _ in range(2):
    _, state = tx.update(params, state, params)
  for name in ("adamw", "sam", "func_sam", "precond_func_sam"):
    call = nanosam.value_and_grad(
      benchmark.mlp, benchmark.mean_loss, method=name, rho=benchmark.RHO
    )
    close(call(params, batch, state)[1], benchmark.by_hand(name, params, batch, state)[1], 1e-4)
