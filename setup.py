"""For one thing that pyproject.toml cannot say: a wheel carries configs/ as nanosam/configs."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
  def run(self):
    super().run()
    if not self.editable_mode:
      target = pathlib.Path(self.build_lib, "nanosam", "configs")
      target.mkdir(parents=True, exist_ok=True)
      for file in pathlib.Path(__file__).parent.glob("configs/*.py"):
        shutil.copy(file, target)


setup(cmdclass={"build_py": WithConfigs})
