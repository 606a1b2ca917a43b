"""The export as its users see it: loaded by transformers in torch, and run by lm_eval."""

import importlib.util
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.object_store import ObjectStore
from helpers.training import Commands

from nanosam.data.batch import Batch
from nanosam.data.embedded import collect_documents
from nanosam.model.transformer import unembedding
from nanosam.run import hugging_face, restore

pytestmark = pytest.mark.full

VARIANTS = {
  "tied": ({"model__N": 2}, 1),
  "untied": ({"model__tied": False, "model__activation": "relu", "model__F": 48}, 1),
  "stacked": ({"model__N": 3, "model__scan_layers": True}, 8),  # sharded over eight devices
}


@pytest.fixture(scope="module")
def documents():
  return collect_documents()[:100]


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, commands, tmp_path_factory):
  """A run and its export."""
  folder = tmp_path_factory.mktemp(request.param)
  settings, devices = VARIANTS[request.param]
  outcome = commands.train(folder / "run", devices=devices, **settings)
  assert outcome.code == 0, outcome.err
  outcome = commands("export", f"--workdir={folder / 'run'}", f"--out={folder / 'out'}")
  assert outcome.code == 0, outcome.err
  assert "step 16; the same token ids on 100 validation documents" in outcome.out
  assert sorted(p.name for p in folder.iterdir()) == ["out", "run"]
  assert sorted(p.name for p in (folder / "out").iterdir()) == sorted(hugging_face.FILES)
  return restore.load_run(folder / "run"), folder / "out"


@pytest.fixture(scope="module")
def hf(exported):
  from transformers import AutoModelForCausalLM, AutoTokenizer

  _, out = exported
  model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
  assert type(model).__name__ == "GPT2LMHeadModel"
  assert not any(report.values()), report  # neither missing nor unexpected
  return model.eval(), AutoTokenizer.from_pretrained(out)


def logits(run, ids_BxT):
  params = jax.device_get(run.params)
  h_BxTxD = jax.jit(run.model.hidden)(params, Batch(jnp.asarray(ids_BxT), None, None, None))
  return np.asarray(h_BxTxD @ unembedding(params).T)


def test_logits_on_real_text(exported, hf, documents):
  import torch

  (run, _), (model, tokenizer) = exported, hf
  L = run.config.model.L
  assert model.dtype == torch.float32
  ids_BxL = np.asarray([tokenizer(text)["input_ids"][:L] for text in documents[:20]], np.int32)
  with torch.no_grad():
    theirs_BxLxV = model(torch.tensor(ids_BxL, dtype=torch.int64)).logits.numpy()
  ours_BxLxV = logits(run, ids_BxL)
  assert np.abs(ours_BxLxV).max() > 0.5  # there is something to compare
  np.testing.assert_allclose(theirs_BxLxV, ours_BxLxV, atol=1e-4, rtol=0)


def test_token_ids_of_a_hundred_documents(exported, hf, documents):
  (run, _), (_, tokenizer) = exported, hf
  ours = run.source.tokenizer
  assert len(documents) == 100
  for text in documents:
    ids = tokenizer(text)["input_ids"]
    assert ids == [ours.bos_id, *ours.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
  assert tokenizer("<s>", add_special_tokens=False)["input_ids"] == ours.encode("<s>")
  special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
  assert special == (ours.bos_id, ours.eos_id, ours.pad_id)


def test_greedy_text_is_ours(exported, hf):
  (run, _), (model, tokenizer) = exported, hf
  prompt = tokenizer("Returns the", return_tensors="pt")
  found = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist()
  ids = prompt["input_ids"][0].tolist()
  for _ in range(6):
    ids.append(int(logits(run, [ids])[0, -1].argmax()))
  assert found == ids


TASK = """
task: continuations
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_runs_a_local_task(exported, hf, documents, tmp_path, monkeypatch):
  """Which of two words a document continues with; its likelihoods are ours."""
  (run, _), (model, tokenizer) = exported, hf
  words = [text.split()[-4:] for text in documents]
  rows = [
    {"start": f"{a} {b} {c}", "right": f" {d}", "wrong": f" {other}"}
    for (a, b, c, d), other in zip(words, (w[-1] for w in words[1:]), strict=False)
    if len(run.source.tokenizer.encode(f"{a} {b} {c} {d} {other}")) < run.config.model.L
  ][:8]
  (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
  task = TASK.format(data=tmp_path / "rows.json", cache=tmp_path / "cache")
  (tmp_path / "continuations.yaml").write_text(task)
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  import lm_eval
  from lm_eval.tasks import TaskManager

  lm = language_model(monkeypatch)(pretrained=model, tokenizer=tokenizer, batch_size=4)
  found = lm_eval.simple_evaluate(
    model=lm,
    tasks=["continuations"],
    task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
  )
  samples = found["samples"]["continuations"]
  assert len(samples) == 8
  right = 0
  for sample in samples:
    row = sample["doc"]
    ours = [likelihood(run, row["start"], row[name]) for name in ("right", "wrong")]
    theirs = [answer[0] for answer in sample["filtered_resps"]]
    np.testing.assert_allclose(theirs, ours, atol=1e-3)
    right += ours[0] > ours[1]
  assert found["results"]["continuations"]["acc,none"] == pytest.approx(right / 8)


def language_model(monkeypatch):
  """lm_eval's for transformers. Its module imports accelerate, which loads no model of ours."""
  if not importlib.util.find_spec("accelerate"):
    names = ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size")
    stand_in, inner = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
    for name in names:
      setattr(stand_in, name, None)
    inner.get_max_memory = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", stand_in)
    monkeypatch.setitem(sys.modules, "accelerate.utils", inner)
  from lm_eval.models.huggingface import HFLM

  return HFLM


def likelihood(run, start, rest):
  tokenizer = run.source.tokenizer
  whole = [tokenizer.bos_id, *tokenizer.encode(start + rest)]
  first = 1 + len(tokenizer.encode(start))
  assert len(whole) <= run.config.model.L
  logp_TxV = jax.nn.log_softmax(logits(run, [whole])[0])
  return sum(float(logp_TxV[i - 1, whole[i]]) for i in range(first, len(whole)))


def test_from_a_bucket(cache, whole, commands, tmp_path):
  store = ObjectStore()
  try:
    for path in whole.rglob("*"):
      if path.is_file():
        store.put(f"runs/a/{path.relative_to(whole)}", path.read_bytes(), {}, "")
    remote = Commands(cache, store.environment())
    outcome = remote("export", "--workdir=gs://bucket/runs/a", f"--out={tmp_path / 'a'}")
    assert outcome.code == 0, outcome.err
  finally:
    store.close()
  outcome = commands("export", f"--workdir={whole}", f"--out={tmp_path / 'b'}")
  assert outcome.code == 0, outcome.err
  for name in hugging_face.FILES:
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
  outcome = commands("export", f"--workdir={whole}", f"--out={tmp_path / 'b'}")
  assert outcome.code == 2
  outcome.says_in_one_line("is there already")


@pytest.mark.parametrize("limit", [10_000, 40_000])  # less than the tokenizer, than the weights
def test_a_full_disk_leaves_nothing(whole, commands, tmp_path, limit):
  """No file may grow beyond the limit."""
  code = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({limit}, {limit})); "
  code += "from nanosam import export; from nanosam.system import errors; errors.run(export.main)"
  done = subprocess.run(
    [sys.executable, "-c", code, f"--workdir={whole}", f"--out={tmp_path / 'out'}"],
    env={**commands.environment(1, ""), "JAX_ENABLE_COMPILATION_CACHE": "0"},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 1, done.stderr
  assert "cannot write" in done.stderr.strip().split("\n")[-1]
  assert not list(tmp_path.iterdir())
