"""Whatever is wrong in a user's file is one line with its place."""

import pytest

from nanosam.system import python_file
from nanosam.system.errors import UsageError


def call(text, tmp_path, monkeypatch, convert=list):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(text)
  return python_file.call("sweep", "mine.py", "runs", "3", convert)


def test_the_function_gets_the_argument_and_its_result_is_converted(tmp_path, monkeypatch):
  text = "N = 2\ndef runs(arg):\n  return (int(arg) * N,)\n"
  assert call(text, tmp_path, monkeypatch) == [6]


@pytest.mark.parametrize(
  "text, message",
  [
    ("x = 1\n\ny = z\n", r"sweep file mine\.py, line 3: NameError: name 'z'"),
    ("def runs(arg):\n  yield 1\n  yield 1 / 0\n", r"mine\.py, line 3: ZeroDivisionError"),
    ("def runs(arg):\n  return 1\n", r"sweep file mine\.py: TypeError"),
    ("def run(arg):\n  return []\n", r"sweep file mine\.py defines no runs\(\)"),
    ("def runs(arg) return\n", r"sweep file mine\.py: SyntaxError.*line 1"),
  ],
)
def test_what_is_wrong_and_where(text, message, tmp_path, monkeypatch):
  with pytest.raises(UsageError, match=message) as raised:
    call(text, tmp_path, monkeypatch)
  assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
  call("def runs(arg): return []", tmp_path, monkeypatch)
  with pytest.raises(UsageError, match=r"my\.py does not exist; did you mean mine\.py\?"):
    python_file.call("sweep", "my.py", "runs", None, list)
  with pytest.raises(UsageError, match=r"there is no \.py file in nowhere"):
    python_file.call("sweep", "nowhere/my.py", "runs", None, list)
