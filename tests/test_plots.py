"""The command that draws a run: the files it writes, and what it refuses."""

import shutil

import pytest
from helpers.drawn import read_figure

from nanosam import plots
from nanosam.run.metrics_file import read_metrics
from nanosam.system import errors


def draw(*words):
  plots.main(["plots", *words])


def test_a_run_without_taus_has_no_picture_of_them(whole, tmp_path):
  with pytest.raises(errors.UserError, match=r"diagnostics\.every"):
    draw(f"--workdir={whole}", "--what=tau", f"--out={tmp_path / 'taus'}")


def test_figures_have_the_names_asked_for(whole, tmp_path, capsys):
  for name, stem in (("rho0.1", "rho0.1"), ("rho0.05", "rho0.05"), ("loss.svg", "loss")):
    draw(f"--workdir={whole}", f"--out={tmp_path / name}")
    written = f"written: {tmp_path / stem}.svg and {tmp_path / stem}.png\n"
    assert capsys.readouterr().out == written
    drawn = read_figure(tmp_path / stem)
    assert {"training", "eval", "step", "loss (nats per token)"} <= {*drawn.words}
    records = read_metrics(whole / "metrics.jsonl")
    for line, key in zip(drawn.lines, ("train/loss", "eval/loss"), strict=True):
      assert line.follows([r[key] for r in records if key in r])
  with pytest.raises(errors.UserError, match="cannot write"):
    draw(f"--workdir={whole}", "--out=/proc/x/y")
  shutil.copy(whole / "config.json", tmp_path)
  with pytest.raises(errors.UserError, match=r"no metrics\.jsonl"):
    draw(f"--workdir={tmp_path}", f"--out={tmp_path / 'loss'}")
