"""The documents as pages: no link leads nowhere."""

import re

import pytest
from helpers.scripts import load_script
from helpers.training import ROOT


@pytest.fixture
def docs():
  return load_script("scripts/docs.py")


def test_pages_link_to_pages_and_copies(docs, tmp_path):
  docs.main(["docs.py", f"--out={tmp_path}"])
  for page in tmp_path.rglob("*.html"):
    for place in re.findall('(?:href|src)="([^"]*)"', page.read_text()):
      file = place.partition("#")[0]
      if not re.match("[a-z]+:", place):
        assert not file or (page.parent / file).is_file(), (page, place)
  index = (tmp_path / "index.html").read_text()
  assert 'href="ARCHITECTURE.html"' in index and "<table>" in index
  assert (tmp_path / "docs" / "quickstart.svg").is_file()


@pytest.mark.parametrize(
  "link", ["docs/nothing.md", "ARCHITECTURE.md#no-such-part", "../outside.md"]
)
def test_a_link_that_leads_nowhere_is_named(docs, tmp_path, link):
  file, architecture = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
  bodies = {file: "", architecture: '<h2 id="the-rooms">'}
  for target, wrong in ((link, [f"README.md: {link}"]), ("ARCHITECTURE.md#the-rooms", [])):
    assert docs.with_links(file, f'<a href="{target}">', bodies, tmp_path)[1] == wrong
