"""metrics.jsonl: what is on disk after resumes, kills and damage."""

import json
import math
import os

import numpy as np
import pytest
from helpers.writers import open_all

from nanosam.run import metrics_file
from nanosam.system.errors import UserError


def strict_lines(path):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_records_are_strict_json_and_read_back(tmp_path):
  w = open_all(tmp_path)
  w.write(1, {"train/loss": math.nan, "opt/grad_norm": math.inf, "low": -math.inf, "note": "x"})
  w.write(np.int64(2), {"train/loss": np.float32(0.5), "guard/nonfinite": np.int32(3)})
  first, second = strict_lines(tmp_path / "metrics.jsonl")  # before close: nothing is buffered
  assert next(iter(first)) == "step" and first["train/loss"] == "NaN"
  assert second == {"step": 2, "train/loss": 0.5, "guard/nonfinite": 3}
  w.close()
  back = metrics_file.read_metrics(tmp_path / "metrics.jsonl")[0]
  assert math.isnan(back.pop("train/loss"))
  assert back == {"step": 1, "opt/grad_norm": math.inf, "low": -math.inf, "note": "x"}


@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "tra', b'{"step": 2}'])
def test_resume_drops_later_records_and_a_torn_line(tmp_path, tail):
  path = tmp_path / "metrics.jsonl"
  w = open_all(tmp_path)
  for step in range(1, 5):
    w.write(step, {"x": step})
  w.close()
  with open(path, "ab") as f:
    f.write(tail)
  assert len(metrics_file.read_metrics(path)) == 4 + (tail == b'{"step": 2}')
  w = open_all(tmp_path, resume_step=2)
  w.write(3, {"x": 30})
  w.close()
  whole_but_unended = [2] if tail == b'{"step": 2}' else []
  assert [r["step"] for r in strict_lines(path)] == [1, 2, *whole_but_unended, 3]
  assert list(tmp_path.iterdir()) == [path]


def test_fresh_start_drops_records_that_no_checkpoint_backs(tmp_path):
  for _ in range(2):
    w = open_all(tmp_path)
    w.write(0, {"x": 1})
    w.close()
  assert len(metrics_file.read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_damage_in_the_middle_is_reported_not_skipped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(UserError, match="line 2"):
    metrics_file.read_metrics(path)
  with pytest.raises(UserError, match="line 2"):
    open_all(tmp_path, resume_step=3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_names_the_file(tmp_path):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  w = open_all(tmp_path)
  with pytest.raises(UserError, match=r"metrics\.jsonl: No space left"):
    w.write(1, {"x": 1})
  w.close()
