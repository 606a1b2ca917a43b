"""The files for SkyPilot and GKE: what they say agrees with itself, and their commands with ours.

Their own schemas (sky.utils.schemas, the JobSet CRD) accepted both; this holds what schemas do not.
"""

import math
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from helpers.training import ROOT

from nanosam import config
from nanosam.run.validate import validate
from nanosam.system.errors import Interrupted


def read(name):
  return yaml.safe_load((ROOT / "launch" / name).read_text())


def check(words):
  validate(config.from_command_line(["train", *words]))


def test_a_jobset_has_as_many_pods_as_its_slice_has_hosts():
  spec = read("gke_jobset.yaml")["spec"]
  (job,) = spec["replicatedJobs"]
  hosts, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  chips = math.prod(map(int, topology.split("x")))
  assert hosts["parallelism"] == hosts["completions"]
  assert hosts["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == chips
  assert pod["restartPolicy"] == "Never", "a podFailurePolicy needs it"
  assert container["command"] == ["nanosam", "train"]
  check(container["args"])


def test_a_jobset_resumes_what_saved_and_what_was_taken_away_and_nothing_else():
  spec = read("gke_jobset.yaml")["spec"]
  first, second = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
  assert first["onExitCodes"] == {"operator": "In", "values": [Interrupted.exit_code]}
  assert second["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
  assert spec["failurePolicy"]["maxRestarts"] == 0
  (rule,) = spec["failurePolicy"]["rules"]
  assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_starts_the_run_on_every_node(tmp_path, nodes):
  task = read("skypilot.yaml")
  assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [Interrupted.exit_code]
  check(task["envs"]["ARGS"].split())
  python = tmp_path / ".venv" / "bin" / "python"
  python.parent.mkdir(parents=True)
  python.write_text('#!/usr/bin/env bash\nprintf "%q " "$@"\nexit 75\n')
  python.chmod(0o700)
  sky = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": "1"}
  sky |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
  done = subprocess.run(
    ["bash", "-c", task["run"]],
    cwd=tmp_path,
    env={**os.environ, **task["envs"], **sky},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 75, done.stderr
  _, module, *words = shlex.split(done.stdout)
  assert module == "nanosam.train"
  c = config.from_command_line(["train", *words])
  cluster = (c.cluster.coordinator, c.cluster.num_processes, c.cluster.process_id)
  assert cluster == (("10.0.0.1:8476", 2, 1) if nodes == 2 else ("", 0, -1))


def test_the_check_before_renting(tmp_path):
  def checked(*words):
    command = [sys.executable, "launch/check.py", *words, "--config.workdir=gs://b/run"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

  assert checked("--config=configs/quickstart.py").returncode == 0
  method = tmp_path / "mine.py"
  method.write_text((ROOT / "launch" / "methods" / "sign.py").read_text())
  words = ["--config=configs/quickstart.py", f"--config.opt.method={method}:sign_func_sam"]
  done = checked(*words)
  assert done.returncode == 2 and "only files below" in done.stderr
