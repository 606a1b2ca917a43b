"""What `import nanosam` offers."""

import doctest
import importlib
import subprocess
import sys

import pytest

import nanosam


@pytest.mark.parametrize("module", sorted(set(nanosam._PUBLIC.values())))
def test_examples_in_docstrings(module):
  result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
  assert result.failed == 0


def test_every_public_function_has_an_example():
  for name in nanosam.__all__:
    thing = getattr(nanosam, name)
    if callable(thing) and not isinstance(thing, type):
      assert ">>> " in thing.__doc__, name


def test_importing_the_package_does_not_wait_for_jax():
  code = "import sys, nanosam; assert not {'jax', 'optax', 'flax'} & set(sys.modules)"
  subprocess.run([sys.executable, "-c", code], check=True)
  with pytest.raises(AttributeError, match="no attribute 'valu_and_grad'"):
    nanosam.valu_and_grad  # noqa: B018
