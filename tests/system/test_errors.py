"""How commands end."""

import subprocess
import sys

import pytest
from helpers.training import ROOT

START = "from nanosam.system import errors; errors.run(lambda argv: {})"


@pytest.mark.parametrize(
  "action, code, words",
  [
    ("(_ for _ in ()).throw(errors.UserError('mend it'))", 1, "nanosam: mend it\n"),
    ("(_ for _ in ()).throw(errors.UsageError('say it'))", 2, "nanosam: say it\n"),
    ("(_ for _ in ()).throw(KeyboardInterrupt)", 130, "nanosam: stopped\n"),
  ],
)
def test_one_line_and_an_exit_code(action, code, words):
  command = [sys.executable, "-c", START.format(action)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (code, words)


def test_a_reader_that_goes_away():
  code = START.format("[print('x' * 1000, flush=True) for _ in range(1000)]")
  process = subprocess.Popen(
    [sys.executable, "-c", code],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  process.stdout.readline()
  process.stdout.close()
  assert process.stderr.read() == "nanosam: stopped: nothing reads the output any more\n"
  assert process.wait() == 1
