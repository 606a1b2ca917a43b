"""The writers of a run, and code in a process of its own."""

import subprocess
import sys
import textwrap

from helpers.training import ROOT
from nanosam.run import log

RUN = {"name": "n", "group": "g", "tags": ["a", "b"], "job_type": "train", "project": "p"}


def open_all(workdir, **changes):
  options = {
    "config": {"opt": {"lr": 0.1}},
    "run": RUN,
    "wandb": "disabled",
    "tensorboard": False,
    "resume_step": None,
    "say": lambda text: None,
  }
  return log.open_writers(workdir, **options | changes)


def run_script(code, *args):
  """What hangs for good is given up on after two minutes, however slow the machine."""
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
    cwd=ROOT,
    timeout=120,
    capture_output=True,
    text=True,
    check=False,
  )
