"""A method in a file of the user's: trained, recorded, read back; its mistakes are named."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.made_up_runs import write_run
from helpers.steps import steps
from helpers.training import ROOT

from nanosam import compare, config
from nanosam.optim.methods import METHODS
from nanosam.run import own_method
from nanosam.run.restore import stored_run
from nanosam.run.validate import validate
from nanosam.study import runs
from nanosam.system.errors import UsageError, UserError

EXAMPLE = ROOT / "launch" / "methods" / "sign.py"
# SAM, written anew: it must be the table's to the bit.
SAM = """
from nanosam.optim import direction, methods
my_sam = methods.Method(direction.gradient, methods.full)
number = 3
sam = my_sam
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(SAM)
  yield path
  for name in [name for name in METHODS if ".py:" in name]:
    del METHODS[name]


def test_it_is_a_row_of_the_table(tiny_config, file):
  tiny_config.opt.update(method="sam", rho=0.1)
  theirs, _ = steps(tiny_config, 3)
  tiny_config.opt.method = f"{file}:my_sam"
  validate(tiny_config)
  ours, _ = steps(tiny_config, 3)
  jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_the_record_has_its_place_and_hash(tiny_config, file, monkeypatch):
  monkeypatch.chdir(file.parent)
  tiny_config.opt.method = "mine.py:my_sam"
  validate(tiny_config)
  opt = config.to_dict(tiny_config)["opt"]
  assert opt["method"] == f"{file}:my_sam" and opt["method_sha256"] == own_method.digest(file)
  before = config.to_dict(tiny_config)
  assert runs.run_id(before).startswith("my_sam-D16-")
  file.write_text(SAM + "# another\n")
  validate(tiny_config)
  (changed,) = config.changed_keys(before, config.to_dict(tiny_config))
  assert changed.startswith("opt.method_sha256: ")
  assert runs.run_id(config.to_dict(tiny_config)) != runs.run_id(before)
  tiny_config.opt.method = "sam"
  validate(tiny_config)
  assert tiny_config.opt.method_sha256 == ""


@pytest.mark.parametrize(
  "name, said",
  [
    ("mine.py:your_sam", "method file .*mine.py defines no your_sam$"),
    ("mine.py:number", "is a int, not a Method: write NAME = Method"),
    ("mine.py:sam", "sam is one of ours; give yours another name"),
    ("mime.py:my_sam", "mime.py does not exist; did you mean mine.py?"),
    ("mysam", "unknown opt.method 'mysam'"),
  ],
)
def test_what_is_wrong_is_named(tiny_config, file, name, said):
  tiny_config.opt.method = f"{file.parent}/{name}" if ":" in name else name
  with pytest.raises(UsageError, match=said):
    validate(tiny_config)


def test_runs_of_it_compare_with_others_even_without_the_file(tmp_path, file, capsys):
  def trained(folder, content, loss):
    file.write_text(content)
    keys = {"opt.method": f"{file}:my_sam", "opt.method_sha256": own_method.digest(file)}
    return write_run(tmp_path / folder, "sam", 1, loss, keys=keys)

  write_run(tmp_path / "runs", "adamw", 1, 3.5)
  first = trained("runs", SAM, 3.4)
  file.unlink()
  compare.main(["compare", str(tmp_path / "runs"), "--json"])
  found = json.loads(capsys.readouterr().out)["groups"]
  assert [g["label"] for g in found] == ["adamw", "my_sam"]
  with pytest.raises(UserError, match=r"my_sam of .*mine.py, which is gone: put back the file"):
    stored_run(first)
  trained("runs", SAM + "# another\n", 3.3)
  with pytest.raises(UserError, match="which has changed since"):
    stored_run(first)
  with pytest.raises(UsageError, match=r"opt\.method_sha256 is"):
    compare.main(["compare", str(tmp_path / "runs")])


@pytest.mark.full
def test_training_and_resuming(commands, tmp_path):
  file = tmp_path / "sign.py"
  shutil.copy(EXAMPLE, file)
  method, workdir = f"{file}:sign_func_sam", tmp_path / "run"
  outcome = commands.train(workdir, fault="SIGTERM@step:4", opt__method=method)
  assert outcome.code == 75, outcome.err
  text = file.read_text()
  file.write_text(text + "# changed\n")
  commands.train(workdir, opt__method=method).says_in_one_line("opt.method_sha256")
  file.write_text(text)
  outcome = commands.train(workdir, opt__method=method)
  assert outcome.code == 0, outcome.err
  assert commands("sample", f"--workdir={workdir}", "--length=2").code == 0
  file.unlink()
  outcome = commands("evaluate", f"--workdir={workdir}")
  assert outcome.code == 1
  outcome.says_in_one_line("sign_func_sam of", "is gone")
