"""A page of sections, tables and figures: HTML that needs nothing beside it, and Markdown."""

import html
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nanosam.study import tables
from nanosam.study.figures import DARK, GRID, INK, MUTED, STYLES
from nanosam.study.tables import Table
from nanosam.system.files import write_atomically

FIGURES = "figures"  # their folder, beside the Markdown


class Text(NamedTuple):
  """A paragraph; `code` is in backticks."""

  text: str


class Items(NamedTuple):
  items: Sequence[str]


class Grid(NamedTuple):
  """A table, under its caption."""

  caption: str
  table: Table


class Figure(NamedTuple):
  name: str  # also that of its file
  caption: str
  svg: str
  values: Table  # the same in numbers


class Figures(NamedTuple):
  """Side by side where there is room."""

  figures: Sequence[Figure]


class Folded(NamedTuple):
  summary: str
  blocks: Sequence["Block"]


class Section(NamedTuple):
  title: str
  blocks: Sequence["Block"]


Block = Text | Items | Grid | Figures | Folded | Section


def _present(blocks: Sequence[Block]) -> list[Block]:
  """The blocks that have something to show."""

  def has_content(block: Block) -> bool:
    match block:
      case Text(content) | Items(content) | Figures(content):
        return bool(content)
      case Grid(_, table):
        return bool(table.rows)
      case Folded(_, inner) | Section(_, inner):
        return bool(_present(inner))

  return [block for block in blocks if has_content(block)]


class Page(NamedTuple):
  title: str
  sections: Sequence[Section]

  def write(self, out: pathlib.Path) -> None:
    """report.html, which is self-contained; report.md, with its figures beside it."""
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for f in _figures(self.sections):
      by_itself = f.svg.replace("<svg ", '<svg style="background: white" ', 1)
      write_atomically(out / FIGURES / f"{f.name}.svg", by_itself.encode())
    write_atomically(out / "report.html", to_html(self).encode())
    write_atomically(out / "report.md", to_markdown(self.title, self.sections).encode())


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
  for block in blocks:
    if isinstance(block, Figures):
      yield from block.figures
    elif isinstance(block, Section | Folded):
      yield from _figures(block.blocks)


# ---- Markdown ------------------------------------------------------------------------------------


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
  return "\n".join([f"# {title}", "", *_markdown(blocks, level=2)])


def _markdown(blocks: Sequence[Block], level: int) -> Iterator[str]:
  for block in _present(blocks):
    match block:
      case Text(text):
        yield from (text, "")
      case Items(items):
        yield from (*(f"- {item}" for item in items), "")
      case Grid(caption, table):
        yield from (f"{caption}:", "", *tables.markdown(table))
      case Figures(drawn):
        for f in drawn:
          yield from (f"![{f.caption}]({FIGURES}/{f.name}.svg)", "", f"{f.caption}.", "")
          yield from _folded_markdown("values", tables.markdown(f.values))
      case Folded(summary, inner):
        yield from _folded_markdown(summary, _markdown(inner, level))
      case Section(title, inner):
        yield from (f"{'#' * level} {title}", "", *_markdown(inner, level + 1))


def _folded_markdown(summary: str, lines: Iterator[str] | list[str]) -> Iterator[str]:
  yield from (f"<details><summary>{html.escape(summary)}</summary>", "", *lines, "</details>", "")


# ---- HTML ----------------------------------------------------------------------------------------

COLOURS = sorted({INK, MUTED, GRID, *(colour for colour, _ in STYLES.values())})


def _variables(dark: bool) -> str:
  return "".join(f"--{c[1:].lower()}:{DARK.get(c, c) if dark else c};" for c in COLOURS)


def _style() -> str:
  """page.css, and the colours of the figures on a light and on a dark page."""
  light, dark = (f":root{{{_variables(dark)}}}" for dark in (False, True))
  sheet = pathlib.Path(__file__).with_name("page.css").read_text()
  return f"{light}\n@media (prefers-color-scheme: dark) {{{dark}}}\n{sheet}"


def to_html(page: Page) -> str:
  sections = list(enumerate((s for s in page.sections if _present([s])), 1))
  links = "".join(f'<li><a href="#s{n}">{_text(s.title)}</a></li>' for n, s in sections)
  return "\n".join(
    [
      '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f"<title>{_text(page.title)}</title>\n<style>\n{_style()}\n</style>\n</head>\n<body>",
      f'<header><h1>{_text(page.title)}</h1>\n<nav aria-label="Contents"><ul>{links}</ul></nav>',
      "</header>\n<main>",
      *(line for n, s in sections for line in _section(s, 2, f' id="s{n}"')),
      "<footer>Made by scripts/report.py of NanoSAM.</footer>\n</main>\n</body>\n</html>\n",
    ]
  )


def _section(section: Section, level: int, attributes: str = "") -> Iterator[str]:
  yield f"<section{attributes}><h{level}>{_text(section.title)}</h{level}>"
  yield from (*_html(section.blocks, level + 1), "</section>")


def _html(blocks: Sequence[Block], level: int) -> Iterator[str]:
  for block in _present(blocks):
    match block:
      case Text(text):
        yield f"<p>{_text(text)}</p>"
      case Items(items):
        yield f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>"
      case Grid(caption, table):
        yield _table(table, caption)
      case Figures(drawn):
        yield f'<div class="figures">{"".join(map(_figure, drawn))}</div>'
      case Folded(summary, inner):
        yield f"<details><summary>{_text(summary)}</summary>"
        yield from (*_html(inner, level), "</details>")
      case Section():
        yield from _section(block, level)


def _text(text: str) -> str:
  return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _table(table: Table, caption: str) -> str:
  """Scrolls on its own if it is wider than the page; the first column is the row's header."""
  right = tables.numeric_columns(table)

  def cells(row: Sequence[str], tags: Sequence[str]) -> str:
    return "".join(
      f"<{tag}{' class=n' if is_right else ''}>{_text(x)}</{tag[:2]}>"
      for x, tag, is_right in zip(row, tags, right, strict=True)
    )

  columns = len(table.head)
  head = cells(table.head, ["th scope=col"] * columns)
  tags = ["th scope=row", *["td"] * (columns - 1)]
  rows = "\n".join(f"<tr>{cells(row, tags)}</tr>" for row in table.rows)
  return (
    f'<div class="scroll" role="region" aria-label="{html.escape(caption)}" tabindex="0"><table>'
    f"<caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead>\n"
    f"<tbody>{rows}</tbody></table></div>"
  )


def _figure(f: Figure) -> str:
  return (
    f"<figure>{inline(f.svg, f.name, f.caption)}<figcaption>{_text(f.caption)}</figcaption>"
    f"<details><summary>Values</summary>{_table(f.values, f.caption)}</details></figure>"
  )


def inline(svg: str, name: str, label: str) -> str:
  """An SVG of study/figures.py as part of a page: with unique ids, and the page's colours."""
  svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
  used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", svg))
  svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
  svg = re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
  box = re.search(r'viewBox="[^"]*"', svg)
  assert box, "matplotlib writes one"
  head = f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">'
  svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
  for colour in COLOURS:
    svg = svg.replace(colour.lower(), f"var(--{colour[1:].lower()})")
  return re.sub(r"\n\s*", "\n", svg).strip()
