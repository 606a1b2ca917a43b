"""A vision Transformer by the commands: trained, resumed bit by bit, evaluated, measured."""

import json

import numpy as np
import pytest
from helpers.pictures import write_folder
from helpers.tiny_config import get_config
from helpers.training import assert_same_run

from nanosam import config as config_lib
from nanosam.data.sources import source_of
from nanosam.run.metrics_file import read_metrics
from nanosam.run.validate import check_source, validate
from nanosam.system.errors import UserError

VIT = dict(model__kind="vit", model__L=1, model__image_size=8, data__source="digits")


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("vit") / "run"
  outcome = commands.train(workdir, **VIT, diagnostics__every=8)
  assert outcome.code == 0, outcome.err
  assert "images/s" in outcome.err and "accuracy" in outcome.err
  return workdir


def test_a_run_leaves_what_one_of_text_does(trained):
  records = read_metrics(trained / "metrics.jsonl")
  evaluated = [r for r in records if "eval/loss" in r]
  assert [r["step"] for r in evaluated] == [8, 16]
  assert all(0 <= r["eval/accuracy"] <= 1 and "eval/bits_per_byte" not in r for r in evaluated)
  assert evaluated[-1]["tokens"] == 16 * 8, "an image counts once"
  with np.load(trained / "eval_sequences.npz") as found:
    assert found["nll"].mean() == pytest.approx(evaluated[-1]["eval/loss"])
    assert found["correct"].mean() == pytest.approx(evaluated[-1]["eval/accuracy"])
    rows = len(found["nll"])
  config = json.loads((trained / "config.json").read_text())
  assert config["environment"]["eval_set"]["sequences"] == rows
  taus = [r for r in records if "tau/logit" in r]
  assert [r["step"] for r in taus] == [0, 8, 16]
  for r in taus:
    assert sum(r[f"tau/{path}"] for path in ("logit", "func", "cross")) == pytest.approx(
      1, rel=1e-4
    )


def test_stopped_and_resumed_is_the_same_bit_by_bit(commands, trained, tmp_path):
  first = commands.train(tmp_path / "run", **VIT, fault="SIGTERM@step:9")
  assert first.code == 75, first.err
  second = commands.train(tmp_path / "run", **VIT)
  assert second.code == 0, second.err
  assert_same_run(tmp_path / "run", trained)


def test_the_commands_on_a_run(commands, trained, tmp_path):
  evaluated = commands("evaluate", f"--workdir={trained}", "--json")
  assert evaluated.code == 0, evaluated.err
  found, last = json.loads(evaluated.out), read_metrics(trained / "metrics.jsonl")[-1]
  assert found["eval/loss"] == last["eval/loss"]
  assert found["eval/accuracy"] == last["eval/accuracy"]
  outcome = commands("sample", f"--workdir={trained}")
  assert outcome.code == 2
  outcome.says_in_one_line("digits holds images, and this command is for text")
  source = write_folder(tmp_path / "pets", train=4, test=2)
  outcome = commands("evaluate", f"--workdir={trained}", f"--source={source}")
  outcome.says_in_one_line("other classes or sizes")


@pytest.mark.full
def test_sharpness(commands, trained, tmp_path):
  outcome = commands("sharpness", f"--workdir={trained}", "--batches=1", f"--out={tmp_path}")
  assert outcome.code == 0, outcome.err
  found = json.loads((tmp_path / "sharpness.json").read_text())
  assert found["sequences"] == found["tokens"] == 8
  assert found["lambda_max"]["value"] > found["lambda_min"]["value"]


@pytest.mark.parametrize(
  "changes, said",
  [
    (dict(model__kind="decoder", model__L=32), "digits holds images: set model.kind=vit"),
    (dict(data__source="embedded"), "embedded is text: with model.kind=vit set data.source"),
    (dict(model__image_size=32), "8 x 8 pixels: set model.image_size=8"),
    (dict(model__L=32), "an image has one label, so set model.L=1"),
    (dict(model__patch_size=3), "model.image_size=8 is not divisible by model.patch_size=3"),
    (dict(data__mask_documents=True), "data.mask_documents is for text"),
    (dict(data__repeat=False), "training images, but 16 steps of 800"),
  ],
)
def test_settings_that_cannot_work(cache, tmp_path, changes, said):
  c = get_config()
  c.workdir = str(tmp_path)
  c.batch_size = 800
  for key, value in {**VIT, **changes}.items():
    config_lib.override(c, key.replace("__", "."), str(value))
  with pytest.raises(UserError, match=said) as e:
    validate(c)
    source = source_of(c.data)
    check_source(c, source.image_size)
    source.check_length(L=1, batch_size=800, steps=16, repeat=c.data.repeat)
  assert "\n" not in str(e.value)
