"""Workdirs in a bucket, through real clients and a stand-in for the store (object_store.py)."""

import json
import os
import threading
import time

import pytest
from helpers.object_store import ObjectStore, Refused
from helpers.pair import Pair, assert_close
from helpers.training import CONFIG, Commands, assert_same_run

from nanosam.data.embedded import build_embedded
from nanosam.run import workdir as workdir_lib
from nanosam.run.cluster import ALONE
from nanosam.run.metrics_file import read_metrics
from nanosam.run.workdir import Folder, Lease, RemoteWorkdir
from nanosam.system.errors import UsageError, UserError

RUN = "runs/a"
URI = f"gs://bucket/{RUN}"


@pytest.fixture
def store(monkeypatch):
  store = ObjectStore()
  for key, value in store.environment().items():
    monkeypatch.setenv(key, value)
  yield store
  store.close()


# Claims.


def test_a_claim_that_is_renewed_keeps_others_out(store, monkeypatch, tmp_path):
  monkeypatch.setattr(workdir_lib, "RENEW_EVERY", 0.02)
  lease = Lease(Folder(URI), tmp_path / "one")
  with pytest.raises(UsageError, match="another process is training"):
    Lease(Folder(URI), tmp_path / "two")
  lease.check()
  lease.release()
  assert store.objects == {}


def test_a_claim_of_the_dead_is_taken_over(store, monkeypatch, tmp_path):
  monkeypatch.setattr(workdir_lib, "RENEW_EVERY", 3600)
  monkeypatch.setattr(workdir_lib, "TAKE_OVER_AFTER", 0.1)
  dead = Lease(Folder(URI), tmp_path / "one")
  Lease(Folder(URI), tmp_path / "two").check()
  assert not dead._write()  # it was only slow: now it finds out
  dead.lost = True
  with pytest.raises(UserError, match="took gs://bucket/runs/a over"):
    dead.check()
  dead.release()
  assert list(store.objects) == [f"{RUN}/.lease"]  # the other's


def test_the_same_machine_need_not_wait(store, monkeypatch, tmp_path):
  monkeypatch.setattr(workdir_lib, "TAKE_OVER_AFTER", 3600)
  Lease(Folder(URI), tmp_path / "one")
  Lease(Folder(URI), tmp_path / "one").check()


def test_a_write_whose_answer_was_lost(store, monkeypatch, tmp_path):
  """The client repeats it, and finds its own work in the way."""
  monkeypatch.setattr(workdir_lib, "RENEW_EVERY", 3600)
  lease = Lease(Folder(URI), tmp_path / "one")
  store.put(f"{RUN}/.lease", store.objects[f"{RUN}/.lease"].content, {}, "")
  assert lease._write() and lease._write()


# The mirror.


def test_files_are_sent_and_fetched_on_another_machine(store, tmp_path):
  workdir = RemoteWorkdir(URI, str(tmp_path / "one"), ALONE)
  assert workdir.files.name == "a"
  (workdir.files / "metrics.jsonl").write_text('{"step": 1}\n')
  (workdir.files / "wandb").mkdir()
  (workdir.files / "wandb" / "next_row").write_text("7")
  workdir.upload().result()
  with open(workdir.files / "metrics.jsonl", "a") as f:
    f.write('{"step": 2}\n')
  (workdir.files / "events.1").write_bytes(b"\r\n\0")
  workdir.close()
  other = RemoteWorkdir(URI, str(tmp_path / "two"), ALONE)
  assert [r["step"] for r in read_metrics(other.files / "metrics.jsonl")] == [1, 2]
  assert (other.files / "events.1").read_bytes() == b"\r\n\0"
  assert (other.files / "wandb" / "next_row").read_text() == "7"
  other.close()


def test_metrics_come_after_what_they_speak_of(store, tmp_path):
  workdir = RemoteWorkdir(URI, str(tmp_path), ALONE)
  sent = []
  store.trouble = lambda method, name: sent.append(name) if method == "POST" else None
  for name in ("eval_sequences.npz", "metrics.jsonl", "zzz"):
    (workdir.files / name).write_text(name)
  workdir.upload().result()
  workdir.upload().result()  # nothing changed
  assert sent == [f"{RUN}/{name}" for name in ("eval_sequences.npz", "zzz", "metrics.jsonl")]
  workdir.close()


def test_what_the_bucket_lacks_is_not_the_run(store, tmp_path):
  workdir = RemoteWorkdir(URI, str(tmp_path), ALONE)
  (workdir.files / "metrics.jsonl").write_text('{"step": 1}\n')
  os.close(os.open(workdir.files / "later", os.O_CREAT))  # never sent: the process died
  assert workdir._lease
  workdir._lease.release()
  os.rename(workdir.files.parent / ".lock", workdir.files.parent / ".old")  # as if it had ended
  again = RemoteWorkdir(URI, str(tmp_path), ALONE)
  assert list(again.files.iterdir()) == []
  again.close()


def test_buckets_that_cannot_be_used(store, tmp_path):
  for uri in ("gs://bucket", "s3://bucket/a"):
    with pytest.raises(UsageError, match="gs://BUCKET/PATH"):
      RemoteWorkdir(uri, str(tmp_path), ALONE)
  with pytest.raises(UserError, match="bucket does not exist"):
    RemoteWorkdir("gs://other/a", str(tmp_path), ALONE)

  def read_only(method: str, name: str) -> None:
    if method != "GET":
      raise Refused(403, "x does not have storage.objects.create access.")

  store.trouble = read_only
  with pytest.raises(UserError, match=r"does not have .* access.*check the path and your access"):
    RemoteWorkdir(URI, str(tmp_path), ALONE)


# Whole runs, in processes of their own.


@pytest.fixture
def machine(store, cache, whole, tmp_path):
  """A machine that has seen no run; the corpus and compiled code are there."""

  def make(name: str) -> Commands:
    folder = tmp_path / name
    folder.mkdir()
    for path in cache.iterdir():
      if path.name != "workdirs":
        (folder / path.name).symlink_to(path)
    return Commands(folder, {**store.environment(), "NANOSAM_TEST_TAKE_OVER": "3"})

  return make


@pytest.mark.full
def test_a_run_goes_on_on_another_machine(store, machine, whole, tmp_path):
  first, second = machine("one"), machine("two")
  # It imports torch where that is installed, which takes longer than ten steps of this run.
  first.extra["NANOSAM_TEST_IMPORT"] = "tensorboardX"
  outcome = first.train(URI, fault="SIGKILL@step:10")
  assert outcome.code == -9, outcome.err
  outcome = second.train(URI)
  assert outcome.code == 0, outcome.err
  assert "was last used on" in outcome.err
  assert f"resuming {URI} at step" in outcome.err  # 8, unless that was still on its way
  there = store.download(RUN, tmp_path / "downloaded")
  assert_same_run(there, whole)
  assert {"config.json", "eval_sequences.npz"} < {p.name for p in there.iterdir()}
  assert len(list(there.glob("events.out.tfevents.*"))) == 2
  assert not (there / ".lease").exists()
  outcome = machine("three")("evaluate", f"--workdir={URI}", "--step=12", "--json")
  assert outcome.code == 0, outcome.err
  assert json.loads(outcome.out)["step"] == 12
  outcome = second("evaluate", "--workdir=gs://bucket/nothing")
  assert outcome.code == 2
  outcome.says_in_one_line("gs://bucket/nothing holds no run")


@pytest.mark.full
def test_two_processes_and_a_bucket(store, machine, cache, whole, tmp_path):
  """With the data in the bucket too; then one process goes on."""
  for file in build_embedded(cache, 512).iterdir():
    store.put(f"data/{file.name}", file.read_bytes(), {}, "")
  data = {"data__source": "tokens:gs://bucket/data"}
  outcomes = Pair(machine("pair"), URI, ["", "SIGTERM+pause@step:5"], **data).wait()
  assert [o.code for o in outcomes] == [75, 75], "\n".join(o.err for o in outcomes)
  outcome = machine("one").train(URI, **data)
  assert outcome.code == 0, outcome.err
  assert "resuming" in outcome.err and "was last used" not in outcome.err
  assert_close(store.download(RUN, tmp_path / "downloaded"), whole)


@pytest.mark.full
def test_a_slow_upload_holds_up_the_checkpoint_but_not_the_training(store, machine, tmp_path):
  go = threading.Event()
  complete = f"{RUN}/checkpoints/4/commit_success.txt"

  def slow(method: str, name: str) -> None:
    if (method, name) == ("POST", f"{RUN}/metrics.jsonl"):
      go.wait(300)

  store.trouble = slow
  commands = machine("one")
  process = commands.start("train", f"--config={CONFIG}", f"--config.workdir={URI}")
  try:
    steps_done = 0
    deadline = time.monotonic() + 240
    while steps_done < 7 and time.monotonic() < deadline:
      time.sleep(0.2)
      for file in commands.cache.glob("workdirs/*/a/metrics.jsonl"):
        steps_done = max((r["step"] for r in read_metrics(file)), default=0)
    assert steps_done >= 7 and complete not in store.objects
    go.set()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
  finally:
    go.set()
    process.kill()
