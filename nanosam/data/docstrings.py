"""Documentation out of Python source, read with ast and never imported.

Also a program: JSON paths on stdin, JSON documents on stdout. It then runs without the package,
so several can read in parallel and start at once; hence the standard library alone.
"""

import ast
import json
import signal
import sys
import warnings
from collections.abc import Iterator

# A document ends with the docstring that makes it at least this long, so that a small validation
# set still holds many whole documents.
_DOCUMENT_CHARS = 3000

Entry = tuple[str, str]  # heading, docstring
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_documents(path: str) -> list[list[Entry]]:
  """The documents of one source file, each a list of (heading, docstring)."""
  with open(path, "rb") as f, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
    try:
      tree = ast.parse(f.read())
    except (SyntaxError, ValueError):
      return []  # a template, or Python of another age
  if path.endswith("topics.py") and (topics := _topics(tree)):
    return topics
  documents: list[list[Entry]] = []
  size = _DOCUMENT_CHARS
  for heading, text in _entries(tree, ""):
    if size >= _DOCUMENT_CHARS:
      documents.append([])
      size = 0
    documents[-1].append((heading, text))
    size += len(heading) + len(text)
  return documents


def _entries(node: ast.AST, prefix: str) -> Iterator[Entry]:
  """Docstrings in source order; functions inside functions are nobody's documentation."""
  if isinstance(node, ast.Module) and (text := _docstring(node)):
    yield "", text
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.ClassDef):
      name = prefix + child.name
      if text := _docstring(child):
        yield f"class {name}", text
      yield from _entries(child, f"{name}.")
    elif isinstance(child, _Function) and (text := _docstring(child)):
      yield f"{prefix}{child.name}({_arguments(child)})", text


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
  return (ast.get_docstring(node) or "").strip()


def _arguments(function: _Function) -> str:
  a = function.args
  names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
  return ", ".join(names)


def _topics(tree: ast.Module) -> list[list[Entry]]:
  """pydoc's topics: a dictionary literal of the language reference's sections."""
  for node in tree.body:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
      values = [v.value for v in node.value.values if isinstance(v, ast.Constant)]
      return [[("", v.strip())] for v in values if isinstance(v, str)]
  return []


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a word when nobody listens any more
  json.dump([module_documents(path) for path in json.load(sys.stdin)], sys.stdout)
