"""Extracts docstrings from Python source with ast, without importing it.

Also a program: a JSON list of paths on stdin, their documents as JSON on stdout. It uses the
standard library alone, so that several processes start at once and read in parallel.
"""

import ast
import json
import signal
import sys
import warnings
from collections.abc import Iterator

# A document ends with the docstring that makes it this long. Short documents, so that even a small
# validation set has many whole ones.
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
      return []  # a template, or Python of another version
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
  """Docstrings in source order, except those of functions inside functions."""
  if isinstance(node, ast.Module) and (text := _docstring(node)):
    yield "", text
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.ClassDef):
      name = prefix + child.name
      if text := _docstring(child):
        yield f"class {name}", text
      yield from _entries(child, f"{name}.")
    elif isinstance(child, _Function) and (text := _docstring(child)):
      a = child.args
      names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
      shown = ", ".join(name for name in names if name not in ("self", "cls"))
      yield f"{prefix}{child.name}({shown})", text


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
  return (ast.get_docstring(node) or "").strip()


def _topics(tree: ast.Module) -> list[list[Entry]]:
  """pydoc's topics: a dictionary literal of sections of the language reference."""
  for node in tree.body:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
      values = [v.value for v in node.value.values if isinstance(v, ast.Constant)]
      return [[("", v.strip())] for v in values if isinstance(v, str)]
  return []


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exits silently if the reader is gone
  json.dump([module_documents(path) for path in json.load(sys.stdin)], sys.stdout)
