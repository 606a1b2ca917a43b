"""Stand-ins for programs that rent machines: each records what it was asked.

`gcloud` keeps a TPU slice of two workers in a folder: a worker is a home directory, and a command
sent to it really runs there. `python3.11` is what the workers find: it makes environments and
pretends to train, with the exit codes that a test wants.
"""

import json
import os
import pathlib
import stat
import sys

GCLOUD = """#!{python}
import json, os, pathlib, shutil, signal, subprocess, sys, time

root = pathlib.Path(os.environ["STAND_IN"])
state = root / "state"
words = sys.argv[1:]
with open(root / "gcloud.jsonl", "a") as f:
  f.write(json.dumps(words) + "\\n")
flags = dict(w.split("=", 1) for w in words if w.startswith("--") and "=" in w)
workers = [root / f"worker{{i}}" for i in range(2)]


def now():
  return state.read_text() if state.exists() else ""


if words[:2] == ["storage", "cp"]:
  for source in words[2:-1]:
    shutil.copy(root / "bucket" / source.split("://")[1], words[-1])
elif words[3] == "describe":
  if not now():
    sys.exit("NOT_FOUND")
  print(now())
  if now() == "PROVISIONING":
    state.write_text("ACTIVE")
elif words[3] == "create":
  for worker in workers:
    worker.mkdir()
  state.write_text("PROVISIONING")
elif words[3] == "delete":
  for worker in workers:
    pid = worker / "nanosam" / "run.pid"
    if pid.exists():
      try:
        os.killpg(int(pid.read_text()), signal.SIGKILL)
      except ProcessLookupError:
        pass
    shutil.rmtree(worker)
  state.unlink()
elif words[3] == "scp":
  for worker in workers:
    shutil.copy(words[4], worker / words[5].partition(":")[2])
elif words[3] == "ssh":
  chosen = workers if flags["--worker"] == "all" else [workers[int(flags["--worker"])]]
  code = 0
  for worker in chosen:
    if not worker.exists():
      sys.exit(255)
    command = ["bash", "-c", flags["--command"]]
    process = subprocess.Popen(command, cwd=worker, env={{**os.environ, "HOME": str(worker)}})
    while process.poll() is None:
      if now() != "ACTIVE":  # the machine is gone, and the connection with it
        process.kill()
        sys.exit(255)
      time.sleep(0.02)
    code = code or process.returncode
  sys.exit(code)
"""

PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip"*) echo "$*" >> "$STAND_IN/pip.txt" ;;
  "-m nanosam.train"*)
    echo "$(basename "$HOME"): $*" >> "$STAND_IN/train.txt"
    times=$(grep -c "^$(basename "$HOME")" "$STAND_IN/train.txt")
    echo "training, time $times"
    what=$(sed -n "${times}p" "$STAND_IN/script")
    case $what in
      preempted)
        if [ "$(basename "$HOME")" = worker1 ]; then  # one of them, and not before both train
          until (($(wc -l < "$STAND_IN/train.txt") == 2 * times)); do sleep 0.05; done
          echo SUSPENDED > "$STAND_IN/state.new"
          mv "$STAND_IN/state.new" "$STAND_IN/state"
        fi
        exec sleep 300 ;;
      wait) trap 'echo saved; exit 75' TERM
        touch "$HOME/waiting"
        sleep 300 & wait $! ;;
      *) exit "$what" ;;
    esac ;;
esac
"""

# Records its words and does what the file NAME.script says, if there is one.
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >> "$STAND_IN/calls.txt"
if [ -f "$STAND_IN/$(basename "$0").script" ]; then
  . "$STAND_IN/$(basename "$0").script"
fi
"""


class StandIns:
  def __init__(self, root: pathlib.Path):
    self.root = root
    folder = root / "bin"
    folder.mkdir()
    programs = {"gcloud": GCLOUD.format(python=sys.executable), "python3.11": PYTHON}
    programs |= dict.fromkeys(("srun", "sbatch", "squeue", "scontrol"), RECORDER)
    for name, text in programs.items():
      (folder / name).write_text(text)
      (folder / name).chmod(stat.S_IRWXU)
    self.environment = {
      **os.environ,
      "STAND_IN": str(root),
      "PATH": f"{folder}:{os.environ['PATH']}",
      "POLL_SECONDS": "0.05",
    }

  def calls(self) -> list[str]:
    """Of the recorders, one line each."""
    return self._lines("calls.txt")

  def trainings(self) -> list[str]:
    return self._lines("train.txt")

  def tpu_calls(self, verb: str) -> list[list[str]]:
    return [w for w in map(json.loads, self._lines("gcloud.jsonl")) if w[3:4] == [verb]]

  def _lines(self, file: str) -> list[str]:
    path = self.root / file
    return path.read_text().splitlines() if path.exists() else []
