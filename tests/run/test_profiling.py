import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from nanosam.run.profiling import Profiler, parse_steps
from nanosam.system.errors import UsageError


@pytest.mark.parametrize(
  ("text", "steps"), [("", []), ("3", [3]), ("10-12", [10, 11, 12]), ("7-7", [7])]
)
def test_steps(text, steps):
  assert list(parse_steps(text)) == steps


@pytest.mark.parametrize("text", ["x", "0", "5-3", "1-", "1,2", "-1"])
def test_steps_that_make_no_sense(text):
  with pytest.raises(UsageError, match="FIRST-LAST"):
    parse_steps(text)


def traced_steps(workdir):
  (file,) = workdir.glob("profile/plugins/profile/*/*.trace.json.gz")
  (proto,) = file.parent.glob("*.xplane.pb")
  assert proto.stat().st_size > 1000
  events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
  return sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "train")


def run(workdir, steps, last):
  said = []
  profiler = Profiler(workdir, steps, say=said.append)
  double = jax.jit(lambda x: x + x)
  x = jnp.ones(())
  for step in range(1, last + 1):
    x = profiler.call(step, double, x)
  profiler.close()
  assert x == 2.0**last
  return said


def test_leaves_a_trace_of_exactly_these_steps(tmp_path):
  (line,) = run(tmp_path, "3-5", last=7)
  assert "3-5" in line and str(tmp_path / "profile") in line
  assert traced_steps(tmp_path) == [3, 4, 5]


def test_a_run_that_ends_inside_the_range(tmp_path):
  run(tmp_path, "3-9", last=4)
  assert traced_steps(tmp_path) == [3, 4]


def test_no_steps_no_trace(tmp_path):
  assert run(tmp_path, "", last=3) == []
  assert not (tmp_path / "profile").exists()
