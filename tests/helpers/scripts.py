"""Scripts as modules: they lie in no package, and no test edits sys.path for them."""

import functools
import importlib.util
import types

from helpers.training import ROOT


@functools.cache
def load_script(path: str) -> types.ModuleType:
  """A file of the repository, such as scripts/reproduce.py."""
  name = path.removesuffix(".py").replace("/", "_")
  spec = importlib.util.spec_from_file_location(name, ROOT / path)
  assert spec and spec.loader, path
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
