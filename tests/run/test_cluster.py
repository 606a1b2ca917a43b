"""Several processes: roll call, agreement, and the same results as one. All over loopback."""

import os
import signal
import socket
import subprocess
import sys
import threading

import ml_collections
import numpy as np
import pytest
from helpers.pair import Pair, assert_close, finish, free_port
from helpers.training import CONFIG, ROOT, Outcome, assert_same_run, steps

from nanosam import config
from nanosam.optim.methods import METHODS
from nanosam.run import cluster
from nanosam.run.coordinator import Coordinator, listen
from nanosam.run.metrics_file import read_metrics
from nanosam.system.errors import UsageError, UserError

RESUMABLE = 75


def settings(**values: object) -> ml_collections.ConfigDict:
  c = config.default().cluster
  c.update(values)
  return c


# Who takes part.


def test_one_process_unless_something_says_otherwise(monkeypatch):
  assert cluster.find(settings()) is None
  assert cluster.find(settings(num_processes=1)) is None


def test_explicit_settings(monkeypatch):
  place = cluster.find(settings(coordinator="a:99", num_processes=4, process_id=3))
  assert place == cluster.Place("a:99", 4, 3, None)
  for key, value in {"COORDINATOR": "a:99", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}.items():
    monkeypatch.setenv(f"NANOSAM_{key}", value)
  assert cluster.find(settings()) == place
  assert cluster.find(settings(process_id=0)).process == 0
  assert cluster.find(settings(num_processes=1)) is None


@pytest.mark.parametrize(
  "values, says",
  [
    ({"coordinator": "a:99"}, "cluster.num_processes and"),
    ({"num_processes": 2}, "cluster.coordinator=HOST:PORT"),
    ({"coordinator": "a:99", "num_processes": 2, "process_id": 2}, "must be below"),
    ({"coordinator": "a", "num_processes": 2, "process_id": 1}, "write HOST:PORT"),
  ],
)
def test_settings_that_cannot_work(values, says):
  with pytest.raises(UsageError, match=says):
    cluster.find(settings(**values))


def test_slurm_is_detected(monkeypatch):
  values = {"JOB_ID": "7", "STEP_NODELIST": "gpu[03-04]", "NTASKS": "2", "PROCID": "1"}
  for key, value in {**values, "LOCALID": "0"}.items():
    monkeypatch.setenv(f"SLURM_{key}", value)
  place = cluster.find(settings())
  assert place.coordinator.startswith("gpu03:") and (place.processes, place.process) == (2, 1)
  monkeypatch.setenv("SLURM_NTASKS", "1")
  monkeypatch.setenv("SLURM_PROCID", "0")
  assert cluster.find(settings()) is None  # and all devices of the machine stay visible


# The coordinator; its members are threads here.


def members(port: int, ids: list[int], of: int = 0, timeout: float = 60) -> list[object]:
  """A member, or its error, for each id."""
  results: list[object] = [None] * len(ids)

  def join(slot: int, process: int) -> None:
    try:
      place = cluster.Place(f"127.0.0.1:{port}", of or len(ids), process, None)
      results[slot] = cluster.Member(place, timeout)
    except UserError as e:
      results[slot] = str(e)

  run_all([threading.Thread(target=join, args=pair) for pair in enumerate(ids)])
  return results


def run_all(threads: list[threading.Thread]) -> None:
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120)


def test_values_are_gathered_in_the_order_of_processes():
  port = free_port()
  Coordinator(listen(f"127.0.0.1:{port}"), 3, timeout=60)
  found = members(port, [2, 0, 1])
  results = {}

  def talk(member: cluster.Member, process: int) -> None:
    results[process] = [
      member.gather({"process": process}),
      member.gather(process * 10),
      member.from_first(f"of {process}"),
    ]
    member.leave()

  run_all([threading.Thread(target=talk, args=pair) for pair in zip(found, [2, 0, 1], strict=True)])
  expected = [[{"process": i} for i in range(3)], [0, 10, 20], "of 0"]
  assert results == dict.fromkeys(range(3), expected)


def test_who_did_not_come_is_named(monkeypatch):
  port = free_port()
  Coordinator(listen(f"127.0.0.1:{port}"), 4, timeout=4)
  for said in members(port, [0, 2], of=4):
    assert "process 1, process 3 of 4 did not join" in said
    assert f"0 on {socket.gethostname()}, 2 on" in said
  monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "alpha,beta")
  port = free_port()
  Coordinator(listen(f"127.0.0.1:{port}"), 2, timeout=4)
  assert "process 1 (beta) of 2" in members(port, [0], of=2)[0]


def test_one_id_twice():
  port = free_port()
  Coordinator(listen(f"127.0.0.1:{port}"), 3, timeout=60)
  for said in members(port, [1, 1], of=3):
    assert "two processes have the id 1" in said and "its own cluster.process_id" in said


def test_processes_that_disagree_on_their_number():
  port = free_port()
  Coordinator(listen(f"127.0.0.1:{port}"), 3, timeout=60)
  (said,) = members(port, [1], of=2)
  assert "expects 2 processes, process 0 expects 3" in said


def test_a_coordinator_out_of_reach():
  port = free_port()
  (said,) = members(port, [1], of=2, timeout=0.1)
  assert f"cannot reach the coordinator 127.0.0.1:{port}" in said
  with socket.create_server(("127.0.0.1", port)):  # some other program
    assert listen(f"127.0.0.1:{port}") is None


# Real processes from here on: two of four devices each.


@pytest.fixture(scope="module")
def pair(commands, tmp_path_factory):
  """A run of two processes that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("pair") / "run"
  first, second = finish(commands, workdir)
  assert "eval loss" in first.err and "eval loss" not in second.err  # one of them speaks
  return workdir


@pytest.mark.full
def test_two_processes_train_as_one_does(pair, whole):
  assert_close(pair, whole)
  mine, theirs = (read_metrics(workdir / "metrics.jsonl") for workdir in (pair, whole))
  key = "data/batch_hash"
  assert [r[key] for r in mine if key in r] == [r[key] for r in theirs if key in r]
  with np.load(pair / "eval_sequences.npz") as a, np.load(whole / "eval_sequences.npz") as b:
    np.testing.assert_allclose(a["nll"], b["nll"], rtol=1e-4)
    assert (a["bytes"], a["step"]) == (b["bytes"], b["step"])


@pytest.mark.full
def test_two_processes_measure_tau_as_one_does(commands, tmp_path):
  finish(commands, tmp_path / "two", diagnostics__every=8)
  assert commands.train(tmp_path / "one", diagnostics__every=8).code == 0
  one, two = (
    [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if "tau/logit" in r]
    for name in ("one", "two")
  )
  assert [r["step"] for r in two] == [0, 8, 16]
  for a, b in zip(one, two, strict=True):
    assert b == pytest.approx(a, rel=1e-3, abs=1e-4)


@pytest.mark.full
def test_every_method_gives_the_same_on_two_processes(tmp_path):
  from helpers.cluster_methods import train

  out, address = tmp_path / "params.npz", f"127.0.0.1:{free_port()}"
  flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
  started = [
    subprocess.Popen(
      [sys.executable, ROOT / "tests" / "helpers" / "cluster_methods.py", out, address, str(i)],
      env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": flags},
    )
    for i in range(2)
  ]
  try:
    here = {f"{m}/{k}": v for m in METHODS for k, v in train(m).items()}
    assert [process.wait(900) for process in started] == [0, 0]
  finally:
    for process in started:
      process.kill()
  with np.load(out) as there:
    assert set(there) == set(here) and len(here) > 5 * len(METHODS)
    for key, value in here.items():
      tolerance = {"rtol": 2e-6} if key.endswith("losses") else {"rtol": 2e-3, "atol": 2e-5}
      np.testing.assert_allclose(there[key], value, err_msg=key, **tolerance)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_process_ends_the_other(commands, pair, tmp_path, victim):
  workdir = tmp_path / "run"
  faults = ["", ""]
  faults[victim] = "SIGKILL@step:6"
  outcomes = Pair(commands, workdir, faults).wait()
  assert outcomes[victim].code == -signal.SIGKILL
  other = outcomes[1 - victim]
  assert other.code == RESUMABLE, other.err
  assert f"process {victim}" in other.err and "run the same command to resume" in other.err
  assert steps(workdir) == [4]
  finish(commands, workdir)
  assert_same_run(workdir, pair)


@pytest.mark.full
@pytest.mark.parametrize("victim, sent", [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_request_to_one_process_stops_both_at_one_step(commands, pair, tmp_path, victim, sent):
  workdir = tmp_path / "run"
  faults = ["", ""]
  faults[victim] = f"{sent.name}+pause@step:5"
  outcomes = Pair(commands, workdir, faults, opt__num_train_steps=400, eval_every_steps=200).wait()
  assert [o.code for o in outcomes] == [RESUMABLE] * 2, "\n".join(o.err for o in outcomes)
  last = steps(workdir)[-1]
  for outcome in outcomes:
    outcome.says_in_one_line(f"stopped at step {last}", "to resume")
  assert 5 < last < 400
  assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == last


@pytest.mark.full
def test_a_process_that_answers_no_more(commands, tmp_path):
  """Frozen, not dead: noticed by its silence."""
  outcome, frozen = run_with_frozen_peer(commands, tmp_path / "run")
  assert outcome.code == RESUMABLE, outcome.err
  assert "process 1" in outcome.err and "is gone" in outcome.err
  assert frozen == -signal.SIGKILL


def run_with_frozen_peer(commands, workdir) -> tuple[Outcome, int]:
  pair = Pair(commands, workdir, ["", "SIGSTOP@step:6"])
  first, second = pair.processes
  try:
    out, err = first.communicate(timeout=600)
  finally:
    os.killpg(second.pid, signal.SIGKILL)
  second.communicate(timeout=60)
  return Outcome(first.returncode, out, err), second.returncode


@pytest.mark.full
def test_a_failure_of_one_process_is_told_by_the_other(commands, tmp_path):
  """The second cannot write its part of a checkpoint."""
  workdir = tmp_path / "run"
  outcomes = Pair(commands, workdir, ["", "full:100@step:9"]).wait()
  assert [o.code for o in outcomes] == [1, 1], "\n".join(o.err for o in outcomes)
  assert "process 1" in outcomes[0].err and "could not save" in outcomes[0].err
  assert steps(workdir) == [4, 8]


@pytest.mark.full
def test_processes_come_and_go(commands, whole, tmp_path):
  """Two processes of four devices, one of four, one of one, and two again."""
  workdir = tmp_path / "run"
  outcomes = Pair(commands, workdir, ["SIGTERM+pause@step:2", ""]).wait()
  assert [o.code for o in outcomes] == [RESUMABLE] * 2
  for devices, fault in ((4, "SIGTERM@step:7"), (1, "SIGTERM@step:10")):
    assert commands.train(workdir, devices, fault).code == RESUMABLE
  outcomes = finish(commands, workdir)
  assert "resuming" in outcomes[0].err
  assert_close(workdir, whole)


@pytest.mark.full
def test_a_missing_process_on_the_command_line(commands, tmp_path):
  words = [f"--config={CONFIG}", f"--config.workdir={tmp_path}/run"]
  words += ["--config.cluster.num_processes=2", "--config.cluster.timeout=5"]
  words += [f"--config.cluster.coordinator=127.0.0.1:{free_port()}"]
  for process, parts in ((0, ["process 1 of 2 did not join"]), (1, ["cannot reach the coord"])):
    outcome = commands("train", *words, f"--config.cluster.process_id={process}")
    assert outcome.code == 1
    outcome.says_in_one_line(*parts)
    assert outcome.err.count("\n") == 1


@pytest.mark.full
def test_a_workdir_that_is_not_shared(commands, tmp_path):
  """Each process has a folder of its own under the same name."""
  address = f"127.0.0.1:{free_port()}"
  started = []
  for i in range(2):
    folder = tmp_path / str(i)
    folder.mkdir()
    words = [f"--config={CONFIG}", f"--config.workdir={folder}/run"]
    words += [f"--config.cluster.coordinator={address}", "--config.cluster.num_processes=2"]
    started.append(commands.start("train", *words, f"--config.cluster.process_id={i}"))
  for process in started:
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "is not the same folder for all processes" in err
