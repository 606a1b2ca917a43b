"""The documents beside the README speak of what is there."""

import re

import pytest
import yaml
from helpers.training import ROOT


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_exists(name):
  text = (ROOT / name).read_text()
  named = set(re.findall(r"`((?:nanosam|scripts|launch|tests|configs|\.ci)/[\w./]*)`", text))
  assert len(named) > 5
  assert [file for file in sorted(named) if not (ROOT / file).exists()] == []


def test_citation_and_workflow_are_valid():
  cite = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert "2502.02407" in cite["preferred-citation"]["url"] and cite["cff-version"] == "1.2.0"
  workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
  (job,) = workflow["jobs"].values()
  assert job["steps"][-1]["run"] == ".ci/run"
