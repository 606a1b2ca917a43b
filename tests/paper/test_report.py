"""The page of a study: whole, true to the runs, readable in a real browser; bad input is named."""

import collections
import csv
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers.browser import Browser
from helpers.made_up_runs import METHODS, write_full_run, write_run, write_study
from helpers.scripts import load_script
from helpers.training import ROOT

from nanosam.paper import findings, page, protocol
from nanosam.study import comparison, runs
from nanosam.system.errors import UsageError, UserError

THREE = ("adamw", "sam", "precond_func_sam")


def make(*folders, out):
  load_script("scripts/report.py").main(["report.py", *map(str, folders), f"--out={out}"])
  return (out / "report.html").read_text(), (out / "report.md").read_text()


class Outline(html.parser.HTMLParser):
  """Whether tags close in order, and what has which id."""

  VOID = ("meta", "br", "use")

  def __init__(self, text):
    super().__init__()
    self.stack, self.ids, self.refs = [], [], set()
    self.feed(text)
    assert not self.stack

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.ids += [attrs["id"]] if "id" in attrs else []
    self.refs |= {v[1:] for k, v in attrs.items() if k == "href"}
    self.refs |= set(re.findall(r"url\(#([^)]+)\)", " ".join(map(str, attrs.values()))))
    if tag not in self.VOID:
      self.stack.append(tag)

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def study(tmp_path_factory):
  """48 runs of two widths, as long training leaves them; with taus, sharpness and pruning."""
  folder = tmp_path_factory.mktemp("study")
  for workdir in write_study(folder / "runs"):
    add_measurements(workdir)
  write_study(folder / "runs", methods=THREE, keys={"model.D": 128})
  return folder


def add_measurements(workdir):
  config = json.loads((workdir / "config.json").read_text())
  facts = {"step": config["opt"]["num_train_steps"], "method": config["opt"]["method"]}
  sharp = {k: {"value": 10.5, "sem": 0.1} for k in ("lambda_max", "trace_H", "trace_HG")}
  (workdir / "sharpness.json").write_text(json.dumps({**facts, **sharp}))
  points = [{"sparsity": x / 10, "loss": 4 + x / 5} for x in range(6)]
  (workdir / "prune.json").write_text(json.dumps({**facts, "points": points}))


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
  out = tmp_path_factory.mktemp("report")
  make(study, out=out)
  return out


def test_the_page_says_what_compare_says(study, written):
  found, _ = runs.find_runs([study])
  narrow = [r for r in found if r.keys["model.D"] == 64]
  expected = comparison.compare(narrow, tune=["opt.rho"]).group("precond_func_sam")
  low, high = expected.difference.intervals["both"][:2]
  for name in ("report.html", "report.md"):
    text = (written / name).read_text()
    for words in (
      f"{expected.mean:.4f}",
      f"{expected.difference.mean:+.4f}",
      f"{low:+.4f} to {high:+.4f}",
      "Runs: width 64, steps 1200",
      "Runs: width 128, steps 1200",
      "Eval loss (nats) against compute (FLOPs); bands: from the lowest to the highest seed",
      "Eval loss (nats) against rho",
      "95 % interval",
      "seeds and text",
      "1 x cpu",
      "0" * 40,
      "tau of adamw over training",
      "weights to zero",
      "λ_max(H)",
      "FLOPs a step",
    ):
      assert words in text, (name, words)


def test_every_table_is_there_as_csv_and_latex(study, written):
  files = {p.name for p in (written / "tables").iterdir()}
  captions = len(re.findall(r"<caption>", (written / "report.html").read_text()))
  assert len(files) == 2 * captions
  (main,) = (f for f in files if re.fullmatch(r"runs-width-64.*eval-loss-after.*\.csv", f))
  rows = list(csv.DictReader((written / "tables" / main).open()))
  assert {row["method"] for row in rows} == set(METHODS)
  assert (written / "tables" / main).with_suffix(".tex").read_text().startswith("\\begin{tabular}")


def test_an_interval_of_one_seed_says_so_at_once(tmp_path):
  for method, loss in (("adamw", 3.5), ("sam", 3.4)):
    write_run(tmp_path, method, 1, loss)
  _, markdown = make(tmp_path, out=tmp_path / "out")
  short = markdown[: markdown.index("## Runs")]
  row = next(line for line in short.splitlines() if "| sam |" in line)
  assert "| 1 | -0.1000 | -0.1000 to -0.1000 | other text only |" in row
  assert "another seed may give another sign" in short


def test_the_page_is_whole_and_needs_nothing(written):
  text = (written / "report.html").read_text()
  outline = Outline(text)
  assert [i for i, n in collections.Counter(outline.ids).items() if n > 1] == []
  assert outline.refs <= set(outline.ids)
  assert not re.search(r"https?://|src=|@import|<link|<script", text)
  assert len(text.encode()) < 2_000_000
  figures = re.findall(r"\]\((figures/[^)]+)\)", (written / "report.md").read_text())
  assert len(figures) == text.count("<svg ") > 10
  for figure in figures:
    assert (written / figure).read_text().rstrip().endswith("</svg>")
  # Every figure's values are there as a table too.
  assert text.count("<summary>Values</summary><div") == len(figures)


def test_values_of_a_figure_are_the_runs(study, written):
  text = (written / "report.md").read_text()
  found, _ = runs.find_runs([study])
  adamw = [r for r in found if r.keys["opt.method"] == "adamw" and r.keys["model.D"] == 64]
  means = {step: 0.0 for step in adamw[0].curve("step")[0]}
  for run in adamw:
    for step, loss in zip(*run.curve("step"), strict=True):
      means[step] += loss / len(adamw)
  for step, loss in means.items():
    assert f"| {step:g} | {loss:.4f} |" in text


def test_text_cannot_break_out():
  section = page.Section("a <b> & `c`", [page.Text("</main><script>x</script>")])
  text = page.to_html("<title>", [section])
  Outline(text)
  assert "<script>" not in text and "a &lt;b&gt; &amp; <code>c</code>" in text


def test_what_reproduce_wrote_stands_beside_the_paper(tmp_path):
  methods = ("adamw", "precond_func_sam")
  lab = protocol.Lab("table5", "mini", tmp_path, methods=methods)
  for method in methods:
    for seed in (1, 2):
      spec, loss = lab.spec(lab.settings[0], method), 3.9 - 0.001 * len(method)
      write_run(tmp_path / "runs", method, seed, loss + 0.01 * seed, spec=spec)
  findings.write_report(lab, ["reproduce.py"])
  shutil.rmtree(tmp_path / "runs")  # the results alone are enough
  html, markdown = make(tmp_path, out=tmp_path / "out")
  assert "table5, mini" in html and "<td class=n>3.8614</td><td class=n>-0.0455</td>" in html
  assert "| -0.0110 |" in markdown and "| 3.8614 | -0.0455 |" in markdown
  assert "experiment0-0-differences.svg" in markdown


def test_sharpness_beside_the_paper(tmp_path):
  results = {
    "measured": {"width 64": {"sharpness": {"adamw": [{"lambda_max": {"value": 9.5}}]}}},
    "paper_sharpness": {"23.9M": {"adamw": {"lambda_max": 10.61}}},
  }
  grid, figures = findings.measured_blocks(results, "width 64", "23.9M", "x")
  assert grid.table.rows[0][:3] == ["adamw", "1", "9.5 (10.61)"] and not figures.figures


def test_a_study_whose_perturbed_runs_have_all_just_begun(tmp_path):
  write_run(tmp_path / "runs", "adamw", 1)
  write_run(tmp_path / "runs", "sam", 1, curve={300: 4.0}, keys={"opt.rho": 0.1})
  make(tmp_path / "runs", out=tmp_path / "out")
  assert "adamw" in (tmp_path / "out" / "report.md").read_text()


def test_half_written_and_damaged_are_named_and_left_out(tmp_path, capsys):
  for seed in (1, 2):
    write_run(tmp_path, "adamw", seed, 3.5)
    write_run(tmp_path, "sam", seed, 3.4)
  half = write_run(tmp_path, "sam", 3, curve={300: 4.0})
  (tmp_path / "table1").mkdir()
  broken = tmp_path / "table1" / "results.json"
  broken.write_text('{"experiment": "table1"')
  html, markdown = make(tmp_path, out=tmp_path / "out")
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 2 and all(line.startswith("nanosam: left out") for line in lines)
  assert f"{half}: unfinished at" in lines[0] and f"{broken}: not what" in lines[1]
  for text in (html, markdown):
    assert "unfinished at step 300 of 1200" in text
  assert "| adamw | 3.5000 | 0.0000 | 2 |" in markdown
  broken.write_text('{"experiment": "table1", "scale": "mini"}')
  assert "not what scripts/reproduce.py writes (KeyError" in make(tmp_path, out=tmp_path / "out")[1]


def test_a_copy_of_a_run_counts_once_and_lends_its_taus(tmp_path):
  write_run(tmp_path / "runs", "adamw", 1, 3.5)
  write_run(tmp_path / "runs", "sam", 1, 3.4)
  write_full_run(tmp_path / "runs-tau", "adamw", 1, 0.0)
  _, markdown = make(tmp_path, out=tmp_path / "out")
  assert "is the same run as" in markdown and "2 finished runs; methods: adamw, sam" in markdown
  assert "tau of adamw over training" in markdown


def test_what_a_run_started_from(tmp_path):
  origin = {"workdir": "runs/base", "step": 900, "parameters": "0123456789abcdef"}
  write_run(tmp_path, "adamw", 1, keys={"init_from": "runs/base"}, env={"init_from": origin})
  write_run(tmp_path, "sam", 1, keys={"init_from": "runs/base"}, env={"init_from": origin})
  _, markdown = make(tmp_path, out=tmp_path / "out")
  assert "| started from |" in markdown
  assert markdown.count("| runs/base, step 900, parameters 0123456789abcdef |") == 2


def test_one_run_and_a_method_that_only_diverged(tmp_path):
  write_run(tmp_path, "sam", 1, 3.4)
  bad = write_run(tmp_path, "func_sam", 1)
  (bad / "metrics.jsonl").write_text('{"step": 70, "train/loss": "NaN", "guard/nonfinite": 1}\n')
  text, markdown = make(tmp_path, out=tmp_path / "out")
  assert "| func_sam | diverged |" in markdown and "| sam | 3.4000 |" in markdown
  assert "Eval loss (nats) against steps" in markdown and "nan" not in text.replace("nanosam", "")


def test_nothing_to_report_and_no_place_for_it(tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(UserError, match=r"no finished run and no results.json in .*empty$"):
    make(tmp_path / "empty", out=tmp_path / "out")
  half = write_run(tmp_path / "half", "sam", 3, curve={300: 4.0})
  with pytest.raises(UserError, match=f"left out {half}"):
    make(tmp_path / "half", out=tmp_path / "out")
  with pytest.raises(UserError, match="no such folder"):
    make(tmp_path / "none", out=tmp_path / "out")
  (tmp_path / "file").write_text("")
  with pytest.raises(UsageError, match=r"cannot write to --out=.*file"):
    make(tmp_path / "half", out=tmp_path / "file" / "out")


@pytest.mark.full
def test_the_command_and_the_page_in_a_browser(study, tmp_path):
  command = [sys.executable, "scripts/report.py", study, f"--out={tmp_path}"]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
  url = (tmp_path / "report.html").as_uri()
  colours = set()
  with Browser(tmp_path / "profile") as browser:
    for width in (390, 1280):
      for dark in (False, True):
        browser.open(url, width, dark)
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("innerWidth") == width
        assert browser.evaluate(SVG_OUTSIDE) == []
        colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert browser.evaluate("document.querySelectorAll('svg').length") > 10
        assert browser.requests == [url] and browser.problems == []
  assert len(colours) == 2


# Text that a figure cuts off at its border.
SVG_OUTSIDE = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const t = text.getBoundingClientRect();
    return t.left < box.left - 2 || t.right > box.right + 2 || t.bottom > box.bottom + 2;
  }).map(text => text.textContent);
})"""
