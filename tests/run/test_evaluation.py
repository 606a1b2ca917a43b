import json
import shutil

import jax
import numpy as np
import pytest
from helpers.corpus import write_store

from nanosam import evaluate
from nanosam.data.sources import eval_set
from nanosam.data.tokenizer import train_tokenizer
from nanosam.model import sharding
from nanosam.run import evaluation, restore
from nanosam.run.evaluation import Evaluator, Stopped
from nanosam.run.metrics_file import read_metrics
from nanosam.system import errors


def test_the_standard_error_is_that_of_resampled_sequences():
  rng = np.random.default_rng(0)
  weight = rng.integers(50, 100, 400).astype(float)
  nll = weight * rng.normal(3.0, 0.5, 400)
  found = evaluation.Evaluation(nll, weight, bytes=1000)
  picks = rng.integers(0, 400, (4000, 400))
  bootstrap = np.std(nll[picks].sum(1) / weight[picks].sum(1))
  assert found.loss_sem == pytest.approx(bootstrap, rel=0.05)
  assert found.bits_per_byte == pytest.approx(nll.sum() / np.log(2) / 1000)


def test_the_standard_error_is_that_of_other_documents():
  """Documents of eight sequences, whose sequences share what makes them hard."""
  rng = np.random.default_rng(0)
  weight = np.full(800, 100.0)

  def evaluated():
    difficulty = np.repeat(rng.normal(3.0, 0.5, 100), 8) + rng.normal(0, 0.3, 800)
    return evaluation.Evaluation(weight * difficulty, weight, bytes=1, documents=100)

  many = [evaluated() for _ in range(300)]
  truth = np.std([e.loss for e in many])
  assert np.mean([e.loss_sem for e in many]) == pytest.approx(truth, rel=0.1)
  naive = np.mean([e._replace(documents=0).loss_sem for e in many])
  assert naive < 0.5 * truth, "what a sequence by itself would say"


def test_one_row_a_document_is_evaluated_by_the_row(whole):
  run = restore.load_run(whole)
  run.config.eval_rows = "documents"
  data = eval_set(run.source, run.config)
  found = Evaluator(run.model, data, 16, run.mesh)(run.params)
  assert data.documents == len(found.nll_R)
  assert found.loss_sem == found._replace(documents=0).loss_sem
  assert 0 < found.loss < 10


def test_depends_on_neither_batch_size_nor_devices(whole):
  run = restore.load_run(whole)
  c = run.config
  data = run.source.validation(L=c.model.L, rows=64, mask_documents=False)
  params = jax.device_get(run.params)
  results = []
  for devices, batch_size in [(1, 16), (1, 1), (1, 100), (2, 3), (8, 16)]:
    mesh = sharding.make_mesh(1, -1, jax.devices()[:devices])
    here = jax.device_put(params, sharding.state_shardings(params, mesh))
    results.append(Evaluator(run.model, data, batch_size, mesh)(here))
  for found in results[1:]:
    np.testing.assert_allclose(found.nll_R, results[0].nll_R, rtol=1e-5)
    np.testing.assert_array_equal(found.weight_R, results[0].weight_R)


def test_stops_on_request(whole):
  run = restore.load_run(whole)
  data = run.source.validation(L=32, rows=64, mask_documents=False)
  with pytest.raises(Stopped):
    Evaluator(run.model, data, 8, run.mesh)(run.params, stop=True)


def test_sequences_that_were_lost_are_written_again(whole, tmp_path, capsys):
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir)
  (workdir / "eval_sequences.npz").unlink()
  evaluate.main(["evaluate", f"--workdir={workdir}", "--save"])
  with np.load(workdir / "eval_sequences.npz") as new, np.load(whole / "eval_sequences.npz") as old:
    assert new["step"] == old["step"]
    np.testing.assert_allclose(new["nll"], old["nll"], rtol=1e-5)
  with pytest.raises(errors.UsageError, match="--save is only for the latest raw weights"):
    evaluate.main(["evaluate", f"--workdir={workdir}", "--save", "--step=12"])


def test_the_command_gives_the_loss_of_training(commands, whole):
  outcome = commands("evaluate", f"--workdir={whole}", "--json", devices=1)
  assert outcome.code == 0, outcome.err
  found, record = json.loads(outcome.out), read_metrics(whole / "metrics.jsonl")[-1]
  assert found["step"] == record["step"] == 16
  for key in ("eval/loss", "eval/loss_sem", "eval/bits_per_byte"):
    assert found[key] == record[key]


def test_another_source(whole, tmp_path, capsys):
  tokenizer = restore.load_run(whole).source.tokenizer
  text = "The quick brown fox jumps over the lazy dog. " * 20
  source = write_store(tmp_path / "fox", tokenizer, [text] * 2)
  evaluate.main(["evaluate", f"--workdir={whole}", f"--source={source}", "--step=12", "--json"])
  found = json.loads(capsys.readouterr().out)
  assert (found["step"], found["bytes"]) == (12, 2 * len(text)) and found["eval/loss"] > 3
  evaluate.main(["evaluate", f"--workdir={whole}", f"--source={source}"])
  assert "+-" in capsys.readouterr().out


def test_another_tokenizer_is_refused(whole, tmp_path):
  text = "\n".join(f"the quick brown fox {n} jumps over the lazy dog" for n in range(300))
  source = write_store(tmp_path / "other", train_tokenizer([text], 300), [text])
  with pytest.raises(errors.UsageError, match="another tokenizer"):
    evaluate.main(["evaluate", f"--workdir={whole}", f"--source={source}"])
