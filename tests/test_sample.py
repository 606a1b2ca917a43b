import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nanosam
from nanosam import sample
from nanosam.data.batch import Batch
from nanosam.model import sharding
from nanosam.model.transformer import unembedding
from nanosam.run import restore
from nanosam.system import errors


@pytest.fixture(scope="module")
def run(whole):
  return restore.load_run(whole)  # on the 8 devices of the tests; the run had one


def sampled(run, prompt, *, temperature=1.0, top_k=0, num=1, length=12, seed=0):
  sampler = sample.Sampler(run, temperature=temperature, top_k=top_k)
  return sampler(prompt, num=num, length=length, seed=seed)


def logits(run, ids):
  """Of the token after `ids`, by a forward pass over just these."""
  params = jax.device_get(run.params)
  tokens_1xT = jnp.asarray([ids[-run.config.model.L :]], jnp.int32)
  h_1xTxD = jax.jit(run.model.hidden)(params, Batch(tokens_1xT, None, None, None))
  return h_1xTxD[0, -1] @ unembedding(params).T


@pytest.fixture
def prompt(run):
  return [run.source.tokenizer.bos_id, *run.source.tokenizer.encode("Returns the value of")]


def test_greedy_is_the_argmax_of_the_full_forward_pass(run, prompt):
  """Beyond the context length, where the window slides, too."""
  L = run.config.model.L
  (text,) = sampled(run, prompt, temperature=0.0, length=L + 3)
  assert len(text) == len(prompt) + L + 3  # this model never says eos here
  for place in (len(prompt), len(prompt) + 1, L - 1, L, L + 1, len(text) - 1):
    assert text[place] == jnp.argmax(logits(run, text[:place])), place


def test_a_prompt_longer_than_the_context(run, prompt):
  long_prompt = (prompt * 10)[: run.config.model.L + 5]
  (text,) = sampled(run, long_prompt, temperature=0.0, length=1)
  assert text == [*long_prompt, jnp.argmax(logits(run, long_prompt))]


def test_top_1_is_greedy(run, prompt):
  expected = sampled(run, prompt, temperature=0.0)
  assert sampled(run, prompt, top_k=1, temperature=2.0, seed=5) == expected


def test_a_seed_gives_the_same_texts_whatever_their_number(run, prompt):
  three = sampled(run, prompt, num=3, seed=1)
  assert len({tuple(text) for text in three}) == 3
  assert sampled(run, prompt, num=3, seed=1) == three
  assert sampled(run, prompt, num=1, seed=1) == three[:1]
  assert sampled(run, prompt, num=3, seed=2) != three


def test_tokens_come_with_their_probabilities(run, prompt):
  """Two tokens to choose from: their frequencies, against the softmax of their logits."""
  num, temperature = 400, 0.5
  found = [
    text[len(prompt)]
    for text in sampled(run, prompt, num=num, top_k=2, length=1, temperature=temperature)
  ]
  best, ids = jax.lax.top_k(logits(run, prompt), 2)
  p = jax.nn.softmax(best / temperature)
  assert set(found) <= set(ids.tolist())
  assert found.count(int(ids[0])) / num == pytest.approx(float(p[0]), abs=4 * 0.5 / num**0.5)


def test_ends_at_eos(run, prompt):
  """A model that always says eos after the first token."""
  eos = run.source.tokenizer.eos_id
  params = jax.device_get(run.params)
  params["embed"] = np.zeros_like(params["embed"])
  params["embed"][eos] = 1.0
  params["out_norm"]["scale"] = np.zeros_like(params["out_norm"]["scale"])
  broken = run._replace(params=params)
  # All logits are equal: greedy takes the first token, which is not eos, and never ends.
  assert len(sampled(broken, prompt, temperature=0.0, length=4)[0]) == len(prompt) + 4
  always_eos = run._replace(model=dataclasses.replace(run.model, hidden=_ones(run)), params=params)
  assert sampled(always_eos, prompt, temperature=0.0) == [prompt]


def _ones(run):
  D = run.config.model.D
  return lambda params, batch: jnp.ones((*batch.inputs.shape, D))


def test_compiles_once(run, prompt):
  sampler = sample.Sampler(run, temperature=1.0, top_k=0)
  sampler(prompt, num=2, length=5, seed=0)
  sampler(prompt[:2], num=2, length=5, seed=1)
  assert sampler._next._cache_size() == 1


def test_the_command(commands, whole):
  words = [f"--workdir={whole}", "--prompt=Returns the", "--num=2", "--length=8", "--step=best"]
  first, second = (commands("sample", *words, devices=devices) for devices in (1, 2))
  assert first.code == 0, first.err
  assert first.out.startswith("--- 1 ---\nReturns the") and "--- 2 ---\nReturns the" in first.out
  assert second.out == first.out


def error(*words):
  with pytest.raises(errors.UserError) as caught:
    sample.main(["sample", *words])
  return caught.value


def test_errors(whole, tmp_path):
  there = f"--workdir={whole}"
  assert "choose latest, best or one of 12, 16" in str(error(there, "--step=13"))
  assert "512 tokens" in str(error(there, "--top_k=513"))
  assert "temperature" in str(error(there, "--temperature=-1"))
  assert "at least 1" in str(error(there, "--num=0"))
  assert error(there, "--promt=x").exit_code == 2
  assert error().exit_code == 2
  assert "holds no run" in str(error(f"--workdir={tmp_path}"))
  unsaved = shutil.copytree(whole, tmp_path / "unsaved")
  shutil.rmtree(unsaved / "checkpoints")
  assert "no checkpoint" in str(error(f"--workdir={unsaved}"))
  (unsaved / "checkpoints").mkdir()
  assert "no checkpoint yet" in str(error(f"--workdir={unsaved}"))
  assert not list((unsaved / "checkpoints").iterdir())


def test_other_data_is_refused(whole, tmp_path):
  other = shutil.copytree(whole, tmp_path / "other")
  config = (other / "config.json").read_text()
  (other / "config.json").write_text(
    config.replace(restore.load_run(whole).source.fingerprint, "0" * 16)
  )
  assert "0000000000000000" in str(error(f"--workdir={other}"))


def test_a_damaged_checkpoint_is_refused(whole, tmp_path):
  other = shutil.copytree(whole, tmp_path / "other")
  for file in other.glob("checkpoints/16/state/**/d/*"):
    file.write_bytes(file.read_bytes()[:-9])
  message = str(error(f"--workdir={other}"))
  assert "checkpoint 16" in message and "there are also 12" in message
  assert (other / "checkpoints" / "16").exists()


def test_a_run_in_a_notebook(whole):
  run = nanosam.load(whole)
  assert run.config.model.D == 16 and run.metrics[-1]["step"] == run.step == 16
  tokenizer = run.source.tokenizer
  text = "Return the"
  logits_1xTxV = run.logits(text)
  ids = np.array([[tokenizer.bos_id, *tokenizer.encode(text)]])
  assert logits_1xTxV.shape == (*ids.shape, tokenizer.vocab_size)
  # Its own losses are the evaluator's.
  inputs, targets = ids[:, :-1], ids[:, 1:]
  batch = Batch(np.tile(inputs, (8, 1)), np.tile(targets, (8, 1)), np.ones((8, targets.size)))
  with jax.set_mesh(run.mesh):
    expected = run.model.token_losses(run.params, sharding.to_devices(batch, run.mesh))[0]
  found = optax.softmax_cross_entropy_with_integer_labels(run.logits(inputs)[0], targets[0])
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  with pytest.raises(errors.UsageError, match="33 tokens are more than the model's context of 32"):
    run.logits(np.zeros((1, 33), int))
