"""get_c4.sh against a local server that breaks off, serves rubbish, or cannot resume."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.c4_server import FILES, NAMES, Server
from helpers.training import ROOT

SCRIPT = ROOT / "scripts" / "get_c4.sh"


@pytest.fixture
def server():
  with Server.started() as s:
    yield s


def get(server, *args, cwd):
  env = {**os.environ, "NANOSAM_C4_URL": f"http://127.0.0.1:{server.server_port}/en"}
  env |= {"no_proxy": "*", "NO_PROXY": "*"}
  # No pauses between attempts: a `sleep` that does not.
  tools = Path(cwd) / ".tools"
  tools.mkdir(exist_ok=True)
  (tools / "sleep").write_text("#!/bin/sh\n")
  (tools / "sleep").chmod(0o755)
  env["PATH"] = f"{tools}:{env['PATH']}"
  return subprocess.run(
    ["bash", SCRIPT, *args], env=env, cwd=cwd, capture_output=True, text=True, timeout=60
  )


def assert_complete(directory, count):
  found = {p.name: p.read_bytes() for p in directory.iterdir()}
  assert found == {name: FILES[name] for name in NAMES[: count + 1]}


def test_fetches_states_the_licence_and_says_what_next(server, tmp_path):
  result = get(server, "2", "data", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert_complete(tmp_path / "data", 2)
  assert "ODC-BY" in result.stdout
  assert "python -m nanosam.data.prepare --input=" in result.stdout
  server.requests.clear()
  again = get(server, "3", "data", cwd=tmp_path)
  assert again.returncode == 0
  assert {name for name, _ in server.requests} == {NAMES[3]}, "the rest is there already"
  assert again.stdout.count("have ") == 3


def test_a_broken_transfer_goes_on_where_it_was(server, tmp_path):
  server.misbehave[NAMES[1]] = ["break", "break"]
  result = get(server, "1", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert_complete(tmp_path / "c4", 1)
  ranges = [r for name, r in server.requests if name == NAMES[1]]
  size = len(FILES[NAMES[1]])
  assert ranges[1:] == [f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]


def test_an_earlier_run_that_was_killed_goes_on(server, tmp_path):
  (tmp_path / "c4").mkdir()
  (tmp_path / "c4" / f"{NAMES[1]}.part").write_bytes(FILES[NAMES[1]][:5000])
  result = get(server, "1", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert_complete(tmp_path / "c4", 1)
  assert (NAMES[1], "bytes=5000-") in server.requests


def test_a_part_that_is_whole_is_taken(server, tmp_path):
  (tmp_path / "c4").mkdir()
  (tmp_path / "c4" / f"{NAMES[1]}.part").write_bytes(FILES[NAMES[1]])
  assert get(server, "1", cwd=tmp_path).returncode == 0
  assert_complete(tmp_path / "c4", 1)


def test_damage_is_noticed_and_fetched_anew(server, tmp_path):
  """In a file, in what the server sent, and in the part that was there."""
  (tmp_path / "c4").mkdir()
  flipped = bytearray(FILES[NAMES[0]])
  flipped[1000] ^= 1
  (tmp_path / "c4" / NAMES[0]).write_bytes(flipped)
  (tmp_path / "c4" / f"{NAMES[1]}.part").write_bytes(b"rubbish" * 10)
  server.misbehave[NAMES[2]] = ["rubbish"]
  result = get(server, "2", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert_complete(tmp_path / "c4", 2)


def test_a_server_that_cannot_resume(server, tmp_path):
  server.ranges = False
  (tmp_path / "c4").mkdir()
  (tmp_path / "c4" / f"{NAMES[1]}.part").write_bytes(FILES[NAMES[1]][:5000])
  result = get(server, "1", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert_complete(tmp_path / "c4", 1)


def test_a_shard_that_is_not_to_be_had(server, tmp_path):
  server.misbehave[NAMES[1]] = ["404"] * 9
  result = get(server, "1", cwd=tmp_path)
  assert result.returncode == 1
  assert f"cannot get http://127.0.0.1:{server.server_port}/en/{NAMES[1]}" in result.stderr
  assert "run the same command to go on" in result.stderr
  assert not list((tmp_path / "c4").glob("c4-train*"))


@pytest.mark.parametrize("args", [[], ["x"], ["0"], ["1025"], ["-1"], ["1", "a", "b"]])
def test_bad_requests(server, tmp_path, args):
  result = get(server, *args, cwd=tmp_path)
  assert result.returncode == 2
  assert result.stderr.count("\n") == 1
  assert not server.requests
