"""The command that makes weights, on a proxy that was trained; and training with what it writes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.drawn import read_figure
from helpers.stores import write_store
from helpers.training import ROOT, assert_same_run

from nanosam.data import difficulty
from nanosam.data.store import StoreReader, StoreWriter
from nanosam.data.weights import read_weights
from nanosam.run import restore, scoring
from nanosam.run.record import read_config
from nanosam.run.scoring import Scorer, document_losses
from nanosam.study.figures import BLUE, RED
from nanosam.system.errors import UsageError, UserError

# Repetitive texts are learned early; these numbers never.
EASY = [f"The cat number {i} sat on the mat. " * 8 for i in range(60)]
HARD = [" ".join(str((i * 7919 + j * j * 104729) % 9973) for j in range(40)) for i in range(30)]
TEXTS = [text for i in range(30) for text in (EASY[2 * i], HARD[i], EASY[2 * i + 1])]
OPTIONS = {"checkpoint_every_steps": 8, "max_to_keep": 5, "batch_size": 16}
OPTIONS |= {"opt__num_train_steps": 24, "data__repeat": True, "model__dtype": "float32"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
  path = tmp_path_factory.mktemp("store") / "tiny"
  return write_store(path, [TEXTS[:50], TEXTS[50:]], [*EASY[:6], *HARD[:6]])


@pytest.fixture(scope="module")
def proxy(store, commands, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("proxy") / "run"
  outcome = commands.train(workdir, data__source=f"tokens:{store}", **OPTIONS)
  assert outcome.code == 0, outcome.err
  return workdir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("weights")


def make(proxy, out, *words):
  difficulty.main(["difficulty", f"--workdir={proxy}", f"--out={out}", *words])
  return read_weights(str(out))


@pytest.fixture(scope="module")
def weights(proxy, folder):
  return make(proxy, folder / "hard.npz")


def test_what_a_proxy_has_not_learned_is_hard(weights, store, proxy):
  expected = np.array([text in HARD for text in TEXTS])
  np.testing.assert_array_equal(weights.hard_D, expected)
  np.testing.assert_array_equal(weights.copies_D, 1 + expected)
  facts = weights.facts
  assert facts["store"] == StoreReader(store).fingerprint
  assert facts["steps"] == [8, 16, 24]
  assert facts["clusters"]["hard"]["documents"] == 30 == facts["chosen"]["documents"]
  tokens = StoreReader(store).split("train").documents()[:, 0]
  assert facts["clusters"]["hard"]["tokens"] == tokens[expected].sum()
  assert facts["proxy"]["config"]["opt"]["num_train_steps"] == 24
  assert facts["flops"]["proxy"] == 24 * read_config(proxy)["environment"]["flops_per_step"]
  assert 0 < facts["flops"]["scoring"] < facts["flops"]["proxy"]


def test_losses_are_those_of_the_checkpoints(weights, proxy, folder, store):
  for step in (8, 24):
    run = restore.load_run(proxy, str(step))
    split = StoreReader(store).split("train")
    scorer = Scorer(run.model, split, run.source.tokenizer, run.config, run.mesh)
    (file,) = folder.glob(f"scores-*/{step}.npy")
    np.testing.assert_array_equal(np.load(file), document_losses(scorer, run.params))


def test_other_choices_cost_no_more_scoring(weights, proxy, folder, capsys, monkeypatch):
  monkeypatch.setattr(Scorer, "__call__", None)  # it would fail
  easy = make(proxy, folder / "easy.npz", "--choose=easy", "--copies=3")
  assert easy.copies_D[~weights.hard_D].sum() == 60 + 2 * 30 and easy.copies_D.max() == 3
  random = make(proxy, folder / "random.npz", "--choose=random", "--seed=5")
  assert (random.copies_D == 2).sum() == 30
  last = make(proxy, folder / "last.npz", "--feature=last", "--steps=16")
  assert last.facts["steps"] == [16]
  assert len({w.hash for w in (weights, easy, random)}) == 3
  said = capsys.readouterr().out
  assert "30 documents (easy" in said and "3 times an epoch" in said
  assert "The cat number" in said and said.count("typical hard documents") == 3


def test_relative_is_to_the_model_before_training(weights, proxy, folder):
  found = make(proxy, folder / "relative.npz", "--feature=relative", "--steps=8,24")
  (before,) = (np.load(p) for p in folder.glob("scores-*/0.npy"))
  (after,) = (np.load(p) for p in folder.glob("scores-*/24.npy"))
  ratio = np.log(after / before)
  hard = found.hard_D
  assert found.facts["centroids"]["hard"][-1] == pytest.approx(ratio[hard].mean())
  assert ratio[hard].mean() > ratio[~hard].mean()
  per_pass = weights.facts["flops"]["scoring"] / 3
  assert found.facts["flops"]["scoring"] == pytest.approx(3 * per_pass)  # two and the untrained


def test_the_picture_shows_both_trajectories(weights, folder):
  drawn = read_figure(folder / "hard.npz")
  for name, colour in (("hard", RED), ("easy", BLUE)):
    cluster = weights.facts["clusters"][name]
    assert f"{name}, {cluster['documents']} documents" in drawn.words
    lines = drawn.of(colour)
    assert len(lines) == 6  # five documents and their mean
    assert lines[-1].follows(cluster["losses"])


def test_extra_documents_are_added(proxy, folder, tmp_path, store):
  extra = tmp_path / "rephrased.jsonl"
  extra.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("One more.", "And another.")))
  found = make(proxy, folder / "extra.npz", f"--extra={extra}")
  assert found.extra.num_documents == 2 and found.facts["extra"]["tokens"] > 4
  assert StoreReader(store).tokenizer.decode(found.extra.tokens) == "One more.And another."
  extra.write_text('{"no": 1}\n')
  with pytest.raises(UserError, match=r"rephrased.jsonl:1: no text in field"):
    make(proxy, folder / "extra2.npz", f"--extra={extra}")


def test_what_cannot_work_is_said_in_a_line(proxy, folder, tmp_path, weights):
  out = folder / "never.npz"
  with pytest.raises(UsageError, match=r"no checkpoint 9; .*checkpoints 8, 16, 24.*max_to_keep"):
    make(proxy, out, "--steps=9,16")
  with pytest.raises(UsageError, match=r"needs two checkpoints or more.*or use --feature=last"):
    make(proxy, out, "--steps=16")
  with pytest.raises(UsageError, match="--copies=0 must be"):
    make(proxy, out, "--copies=0")
  other = write_store(tmp_path / "other", [TEXTS[:40]], TEXTS[40:50], vocab_size=290)
  with pytest.raises(UsageError, match="another tokenizer than the proxy"):
    make(proxy, out, f"--source=tokens:{other}")
  with pytest.raises(UsageError, match="digits is no token store"):
    make(proxy, out, "--source=digits")
  assert not out.exists()


def test_a_command_that_was_killed_resumes(weights, proxy, folder, tmp_path, monkeypatch):
  """Here after any batch; the next test really kills it."""
  monkeypatch.setattr(scoring, "SAVE_SECONDS", -1.0)
  call, rows = Scorer.__call__, []

  def interrupted(self, params, at=scoring.START):
    rows.append(at.row)
    for number, done in enumerate(call(self, params, at)):
      if number == 2 and len(rows) < 4:
        raise KeyboardInterrupt
      yield done

  monkeypatch.setattr(Scorer, "__call__", interrupted)
  out = tmp_path / "hard.npz"
  for _ in range(3):
    with pytest.raises(KeyboardInterrupt):
      make(proxy, out)
  assert make(proxy, out).hash == weights.hash
  assert rows[0] == 0 < rows[1] < rows[2] < rows[3]
  for file in folder.glob("scores-*/*.npy"):
    if (same := tmp_path / file.parent.name / file.name).exists():
      assert same.read_bytes() == file.read_bytes()
  assert not list(tmp_path.glob("scores-*/*partial"))


@pytest.mark.full
def test_kill_9_loses_nothing(weights, proxy, folder, tmp_path, commands):
  code = "import sys; from nanosam.run import scoring; scoring.SAVE_SECONDS = -1.0; "
  code += "from nanosam.data import difficulty; difficulty.main(['', *sys.argv[1:]])"
  words = [f"--workdir={proxy}", f"--out={tmp_path / 'w.npz'}"]
  command = [sys.executable, "-c", code, *words]
  killed = 0
  for _ in range(20):
    process = subprocess.Popen(
      command, cwd=ROOT, env=commands.environment(8, ""), stderr=subprocess.DEVNULL
    )
    before = len(list(tmp_path.glob("scores-*/*.npy")))
    while process.poll() is None and len(list(tmp_path.glob("scores-*/*.json"))) < 2:
      time.sleep(0.001)
    if process.poll() is None and before < 2:
      process.send_signal(signal.SIGKILL)
      killed += process.wait() == -signal.SIGKILL
    else:
      assert process.wait() == 0
      break
    if killed >= 3:
      break
  assert killed
  assert make(proxy, tmp_path / "w.npz").hash == weights.hash
  for file in folder.glob("scores-*/[1-9]*.npy"):
    again = np.load(tmp_path / file.parent.name / file.name)
    np.testing.assert_allclose(again, np.load(file), rtol=1e-6)  # of other compiler flags


MEASURED = """
import resource, sys
from nanosam.data import difficulty
difficulty.main(["", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
def test_memory_does_not_depend_on_the_size_of_the_store(proxy, store, commands, tmp_path):
  """A million tokens and ten: their losses alone would take 80 MB."""
  tokenizer, rng = StoreReader(store).tokenizer, np.random.default_rng(0)
  config = json.loads((proxy / "config.json").read_text())
  workdir = tmp_path / "proxy"
  shutil.copytree(proxy, workdir)
  (workdir / "config.json").write_text(json.dumps({**config, "eval_batch_size": 512}))
  peaks = []
  for size in (1, 10):
    writer, folder = StoreWriter(tmp_path / str(size), tokenizer), tmp_path / f"out{size}"
    documents = ((rng.integers(4, 320, 98), 98) for _ in range(10_000 * size))
    train = writer.write_shard("train", 0, documents)
    writer.commit({"train": [train], "validation": [train]})
    words = [f"--workdir={workdir}", f"--source=tokens:{tmp_path / str(size)}", "--feature=last"]
    done = subprocess.run(
      [sys.executable, "-c", MEASURED, *words, f"--out={folder / 'w.npz'}"],
      cwd=ROOT,
      env=commands.environment(1, ""),
      capture_output=True,
      text=True,
      check=True,
    )
    peaks.append(int(done.stdout.split()[-1]))
  assert peaks[1] < 1.1 * peaks[0], peaks


@pytest.mark.full
def test_a_run_with_weights_resumes_bit_by_bit_and_only_with_them(
  weights, proxy, folder, store, commands, tmp_path
):
  file = folder / "hard.npz"
  options = {**OPTIONS, "data__source": f"tokens:{store}", "data__weights": file}
  assert commands.train(tmp_path / "whole", **options).code == 0
  assert commands.train(tmp_path / "killed", fault="SIGKILL@step:11", **options).code < 0
  other = make(proxy, tmp_path / "w.npz", "--choose=easy")
  content = file.read_bytes()
  try:
    os.replace(tmp_path / "w.npz", file)
    refused = commands.train(tmp_path / "killed", **options)
    assert refused.code == 1
    refused.says_in_one_line("made with data.weights", weights.hash, other.hash)
  finally:
    file.write_bytes(content)
  assert commands.train(tmp_path / "killed", **options).code == 0
  assert_same_run(tmp_path / "whole", tmp_path / "killed")
  environment = read_config(tmp_path / "whole")["environment"]
  assert environment["weights"]["hash"] == weights.hash
  assert environment["data"] == StoreReader(store).fingerprint
  without = commands.train(tmp_path / "killed", **{**options, "data__weights": ""})
  without.says_in_one_line("data.weights", "other settings")
