"""Every command of the README is run, made short by the rules below, in the order it stands there.

A command without a rule fails the test: add a line to RULES.
"""

import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest
from helpers.c4_server import Server
from helpers.training import ROOT


class Rule(NamedTuple):
  """For commands that begin with `start`."""

  start: str
  add: str = ""  # arguments that make it short
  swap: tuple[tuple[str, str], ...] = ()  # what stands there -> what is run
  by_ci: bool = False  # .ci/run runs it itself
  elsewhere: str = ""  # the test that runs it, against stand-ins


SMALL = "--config.model.D=16 --config.model.H=2 --config.model.N=1"
TINY = f"{SMALL} --config.model.L=32"
SHORT = "--config.batch_size=8 --config.opt.num_train_steps=4 --config.opt.warmup_steps=1 "
SHORT += "--config.eval_steps=8 --config.eval_batch_size=16 --config.wandb.mode=disabled "
SHORT += "--config.data.repeat=True"
RULES = (
  Rule("bash scripts/quickstart.sh", by_ci=True),
  Rule("bash scripts/test.sh", by_ci=True),
  Rule("python -m nanosam.train --config=configs/vit.py", add=f"{SMALL} {SHORT}"),
  Rule(
    "python -m nanosam.train --config=configs/quickstart.py --config.workdir=runs/sign",
    add=f"{TINY} {SHORT}",
  ),
  Rule(  # the proxy and its target, on a store that is small
    "python -m nanosam.train --config=configs/quickstart.py --config.workdir=runs/",
    add=f"{TINY} {SHORT} --config.checkpoint_every_steps=2 --config.data.source=tokens:data/c4",
  ),
  Rule("python -m nanosam.train", add=f"{TINY} {SHORT}"),
  Rule("python -m nanosam.sample", add="--length=4"),
  Rule("python -m nanosam.evaluate"),
  Rule("bash scripts/get_c4.sh", swap=((" 8 ", " 2 "),)),  # from a server of ours
  Rule("python -m nanosam.data.prepare", swap=(("--vocab_size=32000", "--vocab_size=300"),)),
  Rule("python -m nanosam.data.inspect"),
  Rule("python -m nanosam.data.difficulty"),
  # A sweep of two runs, made for good: the next command compares them.
  Rule(
    "python launch/sweep.py", swap=(("launch/sweeps/example.py", "two_runs.py"), ("--dry_run", ""))
  ),
  Rule("python -m nanosam.compare"),
  Rule(
    "python scripts/reproduce.py simplicity",
    add="--seeds=2 --set=steps=100 --set=proxy_steps=50 --set=sequences=100",
  ),
  Rule("python scripts/reproduce.py"),  # --dry_run
  Rule("python scripts/report.py"),
  Rule("python scripts/wandb_dashboard.py"),  # --dry_run
  Rule("python -m nanosam.plan", add=TINY, swap=(("v5e:2x4", "cpu:2"),)),
  Rule("bash launch/tpu_pod.sh", elsewhere="launch/test_launch.py"),
  Rule("sbatch", elsewhere="launch/test_launch.py"),
  Rule("python launch/local.py", add=f"{TINY} {SHORT}"),
  Rule(
    "python -m nanosam.sharpness",
    add="--batches=1 --batch_size=8 --sem=0.3 --residual=0.2 --density_steps=4 --draws=2",
  ),
  Rule("python -m nanosam.export"),
  Rule("python -m nanosam.prune", add="--sparsity=0,0.5"),
  Rule("python -m nanosam.survive", add="--noise=0.1 --bits=4 --sparsity=0.5"),
)
TWO_RUNS = """
def runs(arg=None):
  return [(f"tests/helpers/tiny_config.py:method={method}", {}) for method in ("adamw", "sam")]
"""


def commands(text: str) -> list[str]:
  """Of the bash blocks: without comments, lines that go on joined."""
  found = []
  for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
    for line in block.replace("\\\n", " ").splitlines():
      if words := shlex.split(line, comments=True):
        found.append(shlex.join(words))
  return found


def rule(command: str) -> Rule:
  found = next((r for r in RULES if command.startswith(r.start)), None)
  assert found, f"README has a command without a rule in {__file__}: {command}"
  return found


def shortened(command: str) -> str:
  for old, new in rule(command).swap:
    assert old in command, f"the rule of '{command}' expects '{old}' in it"
    command = command.replace(old, new)
  return f"{command} {rule(command).add}"


def test_every_command_has_a_rule_and_its_files():
  found = commands((ROOT / "README.md").read_text())
  assert len(found) > 5
  for command in found:
    if rule(command).by_ci:
      assert command in (ROOT / ".ci" / "run").read_text()
    if test := rule(command).elsewhere:
      script = next(w for w in command.split() if w.startswith("launch/"))
      assert script in (ROOT / "tests" / test).read_text()
    for file in re.findall(r"\b(?:configs|scripts|launch)/[\w./]+\.\w+", command):
      assert (ROOT / file).is_file(), command


def test_commands_are_taken_out_of_the_text():
  text = "```bash\na --b='c d' \\\n  --e  # why\n\n# only a comment\nf\n```\n```\nnot one\n```\n"
  assert commands(text) == ["a '--b=c d' --e", "f"]
  with pytest.raises(AssertionError, match="without a rule"):
    rule("python -m nanosam.new_command")


def examples(text: str) -> list[str]:
  """The Python blocks that stand alone."""
  blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
  return [block for block in blocks if block.startswith("import")]


@pytest.mark.parametrize("code", examples((ROOT / "README.md").read_text()))
def test_every_example_runs_as_it_stands(code):
  learned = 0.2 if "optax.apply_updates" in code else 1.0
  code += f"\nassert float(value) < {learned} and float(metrics['guard/nonfinite']) == 0\n"
  run = [sys.executable, "-c", code]
  done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr


def test_the_examples_are_found():
  assert len(examples((ROOT / "README.md").read_text())) == 2


@pytest.fixture
def workplace(tmp_path):
  """As a clone, but what the commands write stays here."""
  for name in ("configs", "scripts", "launch", "nanosam", "tests"):
    (tmp_path / name).symlink_to(ROOT / name)
  (tmp_path / "two_runs.py").write_text(TWO_RUNS)
  return tmp_path


@pytest.mark.full
def test_every_command_runs(workplace, cache):
  with Server.started() as server:
    environment = {
      **os.environ,
      "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
      "PYTHONPATH": str(workplace),
      "NANOSAM_CACHE": str(cache),
      "NANOSAM_C4_URL": f"http://127.0.0.1:{server.server_port}/en",
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
      **{"no_proxy": "*", "NO_PROXY": "*"},
    }
    for command in commands((ROOT / "README.md").read_text()):
      if rule(command).by_ci or rule(command).elsewhere:
        continue
      done = subprocess.run(
        ["bash", "-c", shortened(command)],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
      )
      assert done.returncode == 0, f"{shortened(command)}\n{done.stdout}\n{done.stderr}"
