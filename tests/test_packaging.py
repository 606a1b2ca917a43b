"""What a user without a clone gets: the wheel, the command `nanosam`, the notebook."""

import json
import os
import re
import site
import subprocess
import sys
import zipfile

import pytest
from helpers.training import ROOT

from nanosam.system import console
from nanosam.system.errors import UsageError


def test_the_commands_are_listed(capsys):
  console.dispatch(["nanosam"])
  said = capsys.readouterr().out
  assert {"train", "compare", "plan", "prepare", "inspect"} <= console.commands().keys()
  for name, file in console.commands().items():
    assert re.search(rf"^  {name} +\w.{{20,}}", said, re.M), name
    assert "python -m nanosam" in file.read_text()
  with pytest.raises(UsageError, match="unknown command 'trian': did you mean train"):
    console.dispatch(["nanosam", "trian"])


def run(*words, cwd, **extra):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **extra}
  done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
  return done.stdout


@pytest.mark.full
def test_the_wheel_in_an_environment_of_its_own(tmp_path, cache):
  tree = tmp_path / "tree"  # building leaves files behind
  files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
  for name in files.strip("\0").split("\0"):
    if not name.startswith(("results/", "tests/")) and (ROOT / name).is_file():
      (tree / name).parent.mkdir(parents=True, exist_ok=True)
      (tree / name).write_bytes((ROOT / name).read_bytes())
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
  run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ".", cwd=tree)
  (wheel,) = tmp_path.glob("nanosam-*.whl")
  names = zipfile.ZipFile(wheel).namelist()
  assert {"nanosam/configs/quickstart.py", "nanosam/paper/page.css"} <= set(names)
  assert not [n for n in names if n.startswith(("tests/", "configs/", "scripts/"))]
  # New, with the packages that this one has, but not with this clone.
  run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
  python = tmp_path / "venv" / "bin" / "python"
  (target,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
  (target / "others.pth").write_text("\n".join(site.getsitepackages()))
  run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
  nanosam = str(python.with_name("nanosam"))
  extra = {"NANOSAM_CACHE": str(cache), "PYTHONPATH": ""}
  tiny = [f"--config.model.{k}={v}" for k, v in {"D": 16, "H": 2, "N": 1, "L": 32}.items()]
  short = ["--config.opt.num_train_steps=2", "--config.opt.warmup_steps=1", *tiny]
  short += ["--config.wandb.mode=disabled", "--config.workdir=runs/one", "--config.batch_size=8"]
  run(nanosam, "train", "--config=configs/quickstart.py", *short, cwd=tmp_path, **extra)
  where = run(python, "-c", "import nanosam; print(nanosam.__file__)", cwd=tmp_path, **extra)
  assert where.startswith(str(target))
  assert "adamw" in run(nanosam, "compare", "runs", cwd=tmp_path, **extra)
  code = "from nanosam.paper import page; assert 'table' in page.style()"
  run(python, "-c", code, cwd=tmp_path, **extra)


@pytest.mark.full
def test_the_notebook(tmp_path, cache):
  """Its cells in order, in one process; with fewer steps."""
  cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
  code = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
  assert "STEPS = 100" in code and not re.search(r"^\s*[%!]", code, re.M)
  code = code.replace("STEPS = 100", "STEPS = 12")
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  extra = {"NANOSAM_CACHE": str(cache), "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
  said = run(sys.executable, "-c", code, cwd=tmp_path, **extra)
  assert "other text only" in said and re.search(r"^adamw \d\.\d+$", said, re.M)
