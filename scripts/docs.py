"""Makes pages of the documents: README, ARCHITECTURE, docs/, results/, ...

python scripts/docs.py --out=site

Links between documents become links between pages; what else they show or link to is copied. A link
that leads nowhere is an error. Needs pip install -e '.[test]'.
"""

import html
import os
import pathlib
import re
import shutil
from collections.abc import Mapping

import markdown

from nanosam.paper import page
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = """
  README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs/*.md results/*.md results/*/README.md
""".split()
EXTENSIONS = ("tables", "fenced_code", "toc")


def main(argv: list[str]) -> None:
  p = Parser("python scripts/docs.py", __doc__)
  p.add_argument("--out", required=True, type=pathlib.Path)
  out = p.parse_args(argv[1:]).out
  files = [file for pattern in DOCUMENTS for file in sorted(ROOT.glob(pattern))]
  bodies = {f: markdown.markdown(f.read_text(), extensions=EXTENSIONS) for f in files}
  problems = []
  for file, body in bodies.items():
    linked, wrong = with_links(file, body, bodies, out)
    problems += wrong
    place = out / page_of(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place, to_html(file, linked, bodies).encode())
  if problems:
    raise UserError(f"{len(problems)} links lead nowhere: {'; '.join(problems)}")
  print(f"written: {len(files)} pages, {out / 'index.html'} and on", flush=True)


def page_of(file: pathlib.Path) -> pathlib.Path:
  """Of a document the page, of another file the copy; inside the site."""
  place = file.relative_to(ROOT)
  if place.name == "README.md":
    return place.with_name("index.html")
  return place.with_suffix(".html") if place.suffix == ".md" else place


def with_links(
  file: pathlib.Path, body: str, bodies: Mapping[pathlib.Path, str], out: pathlib.Path
) -> tuple[str, list[str]]:
  """The page's own links, and what is wrong with some; copies what they lead to."""
  wrong = []

  def link(m: re.Match[str]) -> str:
    place, _, anchor = html.unescape(m[2]).partition("#")
    if re.match("[a-z]+:", place):
      return m[0]
    target = (file.parent / place).resolve() if place else file
    if target.is_dir():
      target = target / "README.md"
    known = f'id="{anchor}"' in bodies.get(target, "") if anchor else True
    if not target.is_file() or ROOT not in target.parents or not known:
      wrong.append(f"{file.relative_to(ROOT)}: {m[2]}")
      return m[0]
    if target not in bodies:
      copy = out / page_of(target)
      copy.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(target, copy)
    return f'{m[1]}="{_relative(target, file)}{"#" if anchor else ""}{anchor}"'

  return re.sub('(href|src)="([^"]*)"', link, body), wrong


def _relative(target: pathlib.Path, file: pathlib.Path) -> str:
  return pathlib.Path(os.path.relpath(page_of(target), page_of(file).parent)).as_posix()


def title(body: str, file: pathlib.Path) -> str:
  found = re.search("<h1[^>]*>(.*?)</h1>", body)
  return re.sub("<[^>]+>", "", found[1]) if found else file.stem


def to_html(file: pathlib.Path, body: str, bodies: Mapping[pathlib.Path, str]) -> str:
  links = "".join(
    f'<li><a href="{_relative(other, file)}">{title(text, other)}</a></li>'
    for other, text in bodies.items()
  )
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{title(body, file)}</title>\n<style>\n{page.style()}\n</style>\n</head>\n<body>\n"
    f'<header><nav aria-label="Pages"><ul>{links}</ul></nav></header>\n'
    f"<main>\n{body}\n</main>\n</body>\n</html>\n"
  )


if __name__ == "__main__":
  errors.run(main)
