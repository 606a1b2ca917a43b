"""How commands end."""

import subprocess
import sys

import pytest
from helpers.training import ROOT

from nanosam.system import errors

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


@pytest.mark.parametrize(
  "error, advice",
  [
    (
      RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
      "model.remat=True",
    ),
    (RuntimeError("INTERNAL: Error dispatching computation: Out of memory all"), "smaller micro"),
    (MemoryError(), "out of memory"),
    (RuntimeError("cuDNN is not detected."), "set model.attention=auto"),
    (RuntimeError("Unable to initialize backend 'foo': ..."), "JAX_PLATFORMS=cpu"),
  ],
)
def test_trouble_with_devices_is_one_line(error, advice):
  trouble = errors.device_trouble(error)
  assert advice in str(trouble) and "\n" not in str(trouble)


def test_other_errors_keep_their_traceback():
  assert errors.device_trouble(RuntimeError("dictionary changed size during iteration")) is None
  assert errors.device_trouble(KeyError("out of memory")) is None  # not of JAX
  code = START.format("{}['x']")
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError: 'x'" in done.stderr


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
