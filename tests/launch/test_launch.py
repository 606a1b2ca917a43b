"""Launchers: the local one for real, the others against stand-ins for what rents machines."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers.stand_ins import StandIns
from helpers.training import CONFIG, ROOT

CHECKED = {"PYTHON": sys.executable}  # what checks a run before anything is rented


@pytest.fixture
def stand_ins(tmp_path):
  return StandIns(tmp_path)


@pytest.fixture
def start():
  """Starts a command from the repository; ends what a failing test leaves behind."""

  def start(*words, **environment):
    process = subprocess.Popen(
      words,
      cwd=ROOT,
      env={**os.environ, **environment},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    started.append(process)
    return process

  started = []
  yield start
  for process in started:
    if process.poll() is None:
      process.terminate()
      process.communicate(timeout=100)


def local(start, tmp_path, text, processes=2):
  """`text` as a program of several processes, which know their `me` and share the folder `here`."""
  file = tmp_path / "program.py"
  head = f"import os, pathlib, signal, sys, time\nhere = pathlib.Path({str(tmp_path)!r})\n"
  file.write_text(head + "me = int(os.environ['NANOSAM_PROCESS_ID'])\n" + text)
  command = [sys.executable, "launch/local.py", f"--processes={processes}", "--"]
  return start(*command, sys.executable, "-u", str(file))


def ended(process):
  out, _ = process.communicate(timeout=200)
  return process.returncode, out


def wait_for(condition):
  deadline = time.monotonic() + 200
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_local_processes_know_each_other_and_are_told_apart(start, tmp_path):
  text = "print(os.environ['NANOSAM_NUM_PROCESSES'], os.environ['NANOSAM_COORDINATOR'])\n"
  code, out = ended(local(start, tmp_path, text, processes=3))
  assert code == 0, out
  lines = sorted(out.splitlines())
  assert [line.split()[:2] for line in lines] == [["[0]", "3"], ["[1]", "3"], ["[2]", "3"]]
  addresses = {line.split()[2] for line in lines}
  assert len(addresses) == 1 and addresses.pop().startswith("127.0.0.1:")


def test_when_a_local_process_dies_the_others_are_ended(start, tmp_path):
  text = """
if me == 1:
  sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""
  code, out = ended(local(start, tmp_path, text))
  assert code == 3, out


WAIT_AND_SAVE = """
def save(*_):
  print("saved", flush=True)
  sys.exit(75)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
(here / f"ready{me}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_local_processes_are_told_to_stop_and_not_started_again(start, tmp_path, number):
  process = local(start, tmp_path, WAIT_AND_SAVE)
  wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
  process.send_signal(number)
  code, out = ended(process)
  assert code == 75 and sorted(out.split("\n")[:2]) == ["[0] saved", "[1] saved"], out


def test_local_processes_that_saved_and_stopped_are_started_again(start, tmp_path):
  text = """
first = here / f"first{me}"
if not first.exists():
  first.touch()
  sys.exit(75)
print("second")
"""
  code, out = ended(local(start, tmp_path, text))
  assert code == 0, out
  assert "starting again" in out and "[0] second" in out and "[1] second" in out


@pytest.mark.full
def test_local_processes_join_over_loopback(start, tmp_path):
  text = """
import jax

address, size = os.environ["NANOSAM_COORDINATOR"], int(os.environ["NANOSAM_NUM_PROCESSES"])
jax.distributed.initialize(address, size, me)
print(jax.process_index(), "of", jax.process_count(), "with", jax.device_count(), "devices")
jax.distributed.shutdown()
"""
  code, out = ended(local(start, tmp_path, text))
  assert code == 0, out
  devices = 2 * int(os.environ["XLA_FLAGS"].split("device_count=")[1].split()[0])
  assert f"[1] 1 of 2 with {devices} devices" in out, out


def test_launchers_say_what_is_missing(start, stand_ins):
  code, out = ended(start(sys.executable, "launch/local.py", "--processes=2"))
  assert code == 2 and out.startswith("nanosam: give --processes=N"), out
  code, out = ended(start(sys.executable, "launch/local.py", "--processes=2", "--", "nosuch"))
  assert code == 2 and out.startswith("nanosam: cannot run nosuch: "), out
  pod = ["bash", "launch/tpu_pod.sh"]
  for words, message in (
    ([], "usage: bash launch/tpu_pod.sh run|logs"),
    (["sing", "name"], "unknown command 'sing'"),
    (["run", "name", "--config=configs/mini.py"], "set --config.workdir=gs://"),
    (["run", "name", "--config=configs/mini.py", "--config.opt.roh=1"], "did you mean opt.rho"),
    (
      ["run", "name", "--config=configs/fixed_length.py", "--config.workdir=gs://b/r"],
      "data.source=tokens:data/c4 is on this machine",
    ),
  ):
    code, out = ended(start(*pod, *words, **CHECKED, **stand_ins.environment))
    assert code == 2 and message in out, out
  assert not stand_ins.tpu_calls("create")


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_slurm_job_that_saved_queues_again(start, stand_ins, code):
  (stand_ins.root / "srun.script").write_text(f"exit {code}")
  slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}
  words = ["--config=configs/mini.py", "--config.wandb.tags=two words"]
  job = start("bash", "launch/slurm.sbatch", *words, **stand_ins.environment, **slurm)
  assert ended(job) == (code, "")
  first, *rest = stand_ins.calls()
  assert first.startswith("srun --cpus-per-task=4") and first.endswith(
    ".venv/bin/python -m nanosam.train --config=configs/mini.py --config.wandb.tags=two words"
  )
  assert rest == (["scontrol requeue 7"] if code == 75 else [])


RUN = [f"--config={CONFIG}", "--config.workdir=gs://bucket/run"]


def pod(start, stand_ins, script, *words, **environment):
  (stand_ins.root / "script").write_text(script)
  words = ["bash", "launch/tpu_pod.sh", "run", "slice", *RUN, *words]
  return start(*words, **{**stand_ins.environment, **CHECKED, **environment})


@pytest.mark.full
def test_a_pod_is_made_restarted_and_deleted(start, stand_ins):
  """The run stops after saving, is started again, and finishes."""
  process = pod(start, stand_ins, "75\n0\n", "--config.wandb.name=it's one", SPOT="1")
  code, out = ended(process)
  assert code == 0, out
  assert "training, time 1" in out and "training, time 2" in out
  (create,) = stand_ins.tpu_calls("create")
  for word in ("slice", "--node-id=slice", "--spot", "--accelerator-type=v5litepod-8"):
    assert word in create
  assert len(stand_ins.tpu_calls("delete")) == 1
  assert sorted(stand_ins.trainings()) == [
    f"worker{i}: -m nanosam.train {' '.join(RUN)} --config.wandb.name=it's one"
    for i in (0, 0, 1, 1)
  ]
  assert "-e .[tpu,gcs]" in (stand_ins.root / "pip.txt").read_text()


@pytest.mark.full
def test_a_pod_that_is_taken_away_is_made_again(start, stand_ins):
  code, out = ended(pod(start, stand_ins, "preempted\n0\n", KEEP="1"))
  assert code == 0, out
  assert "slice was preempted" in out
  assert len(stand_ins.tpu_calls("create")) == 2 and len(stand_ins.trainings()) == 4
  assert (stand_ins.root / "state").read_text().strip() == "ACTIVE"  # kept, as asked


@pytest.mark.full
def test_a_pods_run_saves_when_its_launcher_is_stopped(start, stand_ins):
  process = pod(start, stand_ins, "wait\n")
  wait_for(lambda: len(list(stand_ins.root.glob("worker*/waiting"))) == 2)
  process.send_signal(signal.SIGTERM)
  code, out = ended(process)
  assert code == 75 and "saved" in out, out
  assert len(stand_ins.tpu_calls("delete")) == 1 and len(stand_ins.trainings()) == 2


@pytest.mark.full
def test_a_pods_failure_is_the_launchers(start, stand_ins):
  code, out = ended(pod(start, stand_ins, "3\n"))
  assert code == 3 and len(stand_ins.trainings()) == 2, out
  assert len(stand_ins.tpu_calls("delete")) == 1


@pytest.mark.full
def test_workers_that_cannot_be_set_up_are_given_up(start, stand_ins):
  """The reason is told, and nothing is left that costs money."""
  python = stand_ins.root / "bin" / "python3.11"
  broken = '"-m pip"*) echo "ERROR: no matching distribution found for jax" >&2; exit 1 ;;\n'
  text = python.read_text()
  python.write_text(text.replace('  "-m pip"*)', f'  {broken}  "-m pip-not"*)'))
  code, out = ended(pod(start, stand_ins, "0\n", TRIES="2"))
  assert code == 1 and not stand_ins.trainings(), out
  assert out.count("could not be set up") == 2, out
  assert "(try 2 of 2): ERROR: no matching distribution found for jax" in out
  assert len(stand_ins.tpu_calls("create")) == len(stand_ins.tpu_calls("delete")) == 1


def test_a_dry_run_rents_nothing(start, stand_ins):
  code, out = ended(pod(start, stand_ins, "0\n", "--dry_run", SPOT="1"))
  assert code == 0, out
  assert "gcloud compute tpus queued-resources create slice --node-id=slice --spot" in out
  assert "python -m nanosam.train --config=" in out and "--dry_run" not in out
  assert "adamw: 16 steps, 4.1e+03 tokens, into gs://bucket/run" in out
  assert not stand_ins.tpu_calls("create") and not stand_ins.tpu_calls("describe")
  code, out = ended(start("bash", "launch/tpu_pod.sh", "--help"))
  assert code == 0 and out.startswith("Trains on a TPU slice") and "TRIES=3" in out


def sweep(start, stand_ins, tmp_path, backend, **environment):
  file = tmp_path / "one_run.py"
  file.write_text(f"def runs(arg):\n  return [({str(CONFIG)!r}, {{'opt.rho': 0.2}})]\n")
  command = [sys.executable, "launch/sweep.py", f"--sweep={file}", f"--out={tmp_path}/out"]
  environment = {**stand_ins.environment, **CHECKED, **environment}
  return ended(start(*command, f"--backend={backend}", **environment))


def test_a_sweep_is_submitted_to_slurm_once(start, stand_ins, tmp_path):
  (stand_ins.root / "sbatch.script").write_text("echo Submitted batch job 12")
  code, out = sweep(start, stand_ins, tmp_path, "slurm")
  assert code == 0 and "Submitted batch job 12" in out and "in the queue" in out, out
  (submitted,) = [c for c in stand_ins.calls() if c.startswith("sbatch")]
  (run,) = (tmp_path / "out").iterdir()
  assert f"--job-name={run.name} --output={run}/train.log" in submitted
  assert submitted.endswith(f"--config.opt.rho=0.2 --config.workdir={run}")
  (stand_ins.root / "squeue.script").write_text(f"echo other; echo {run.name}")
  code, out = sweep(start, stand_ins, tmp_path, "slurm")
  assert code == 0 and "in the queue" in out, out
  assert len([c for c in stand_ins.calls() if c.startswith("sbatch")]) == 1
  (stand_ins.root / "squeue.script").write_text("echo no controller >&2; exit 1")
  code, out = sweep(start, stand_ins, tmp_path, "slurm")
  assert code == 1 and out.endswith("nanosam: squeue: no controller\n"), out


@pytest.mark.full
def test_a_sweep_on_tpus_brings_its_records_home(start, stand_ins, tmp_path, whole):
  code, out = sweep(start, stand_ins, tmp_path, "tpu")
  assert code == 2 and "NANOSAM_REMOTE=gs://" in out, out
  (stand_ins.root / "script").write_text("0\n")
  # What the run would leave in its bucket: the records of one that really finished.
  name = ended(
    start(
      sys.executable,
      "-c",
      f"""
import pathlib
from nanosam.study import sweeps
print(sweeps.make_jobs(sweeps.load({str(tmp_path / "one_run.py")!r}), pathlib.Path("x"))[0].id)""",
    )
  )[1].strip()
  bucket = stand_ins.root / "bucket" / "b" / name
  bucket.mkdir(parents=True)
  for file in ("config.json", "metrics.jsonl", "eval_sequences.npz"):
    shutil.copy(pathlib.Path(whole) / file, bucket)
  code, out = sweep(start, stand_ins, tmp_path, "tpu", NANOSAM_REMOTE="gs://b")
  assert code == 0 and "finished after" in out, out
  assert all(f"--config.workdir=gs://b/{name}" in line for line in stand_ins.trainings())
  code, out = sweep(start, stand_ins, tmp_path, "tpu", NANOSAM_REMOTE="gs://b")
  assert code == 0 and "finished before" in out and len(stand_ins.tpu_calls("create")) == 1, out


@pytest.mark.full
def test_shell_scripts_are_clean():
  listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
  scripts = [f for f in listed.stdout.split() if f.endswith((".sh", ".sbatch")) or f == ".ci/run"]
  assert {"launch/tpu_pod.sh", "launch/slurm.sbatch", "scripts/test.sh"} <= set(scripts)
  shellcheck = pathlib.Path(sys.executable).parent / "shellcheck"
  found = subprocess.run([shellcheck, *scripts], cwd=ROOT, capture_output=True, text=True)
  assert found.returncode == 0, found.stdout
