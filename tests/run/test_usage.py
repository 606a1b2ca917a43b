"""The help of train says of each key what config.py says."""

import re

import pytest
from helpers.training import ROOT

from nanosam import config as config_lib
from nanosam.run import usage
from nanosam.run.validate import CHOICES
from nanosam.system.errors import UsageError


def test_every_comment_beside_a_key_is_found():
  source = (ROOT / "nanosam" / "config.py").read_text()
  source = source[: source.index("REMOVED = ")]
  beside = re.findall(r"^  \w\.[\w.]+(?:, \w\.\w+)* = .*?  # (.*)$", source, re.M)
  found = usage.comments()
  assert len(beside) > 60 and {*beside} <= {*found.values()}
  assert {key for key, note in found.items() if note} <= {
    *config_lib.flat(config_lib.default()),
    *("cluster",),  # a section has a comment too
  }
  assert found["opt.rho"] == "its radius (adamw has none)"
  assert found["mesh.fsdp"] == "devices that share one copy"
  assert found["model.N"] == found["model.D"] == "layers, heads, width"
  assert found["data.source"].startswith("Text: embedded | tokens:DIR")


def test_every_choice_is_named():
  entries = re.split(r"\n  --config\.", usage.text())
  said = {entry.partition("=")[0]: entry for entry in entries}
  for key, choices in CHOICES.items():
    for choice in choices:
      assert choice in said[key]


def test_the_readme_has_the_same_rho():
  readme = (ROOT / "README.md").read_text()
  for row in usage.rho_table().splitlines()[1:]:
    cells = row.split()[-len(config_lib.SIZES) :]
    assert f" {' | '.join(cells)} |" in readme


def test_rho_by_the_rule():
  assert usage.starting_rho("2M", "sam") == pytest.approx(3e-5 * 10_711_040**0.5, rel=0.01)


@pytest.mark.parametrize(
  "word, hint",
  [
    ("--workdir=X", "did you mean --config.workdir=X?"),
    ("--rho=0.1", "did you mean --config.opt.rho=0.1?"),
    ("--opt.rho=0.1", "did you mean --config.opt.rho=0.1?"),
    ("--frobnicate=1", "usage: --config="),
  ],
)
def test_a_key_without_config_is_recognised(word, hint):
  with pytest.raises(UsageError, match=re.escape(hint)):
    config_lib.from_command_line(["train", "--config=configs/quickstart.py", word])
