"""A page of sections, tables and figures: HTML that needs nothing beside it, and Markdown.

Blocks without content leave no trace, nor do sections of such blocks.
"""

import dataclasses
import functools
import html
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nanosam.study import tables
from nanosam.study.figures import DARK, GRID, INK, MUTED, STYLES, Target
from nanosam.study.tables import Table
from nanosam.system.files import write_atomically

FIGURES, TABLES = "figures", "tables"  # their folders, beside the Markdown


class Text(NamedTuple):
  """A paragraph; `code` is in backticks."""

  text: str


class Items(NamedTuple):
  items: Sequence[str]


class Grid(NamedTuple):
  """A table, under its caption."""

  caption: str
  table: Table


@dataclasses.dataclass
class Figure:
  name: str  # also that of its file
  caption: str
  values: Table  # the same in numbers
  draw: Callable[[Target], None]

  @functools.cached_property
  def svg(self) -> str:
    self.draw(buffer := io.StringIO())
    return buffer.getvalue()


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


def write(out: pathlib.Path, title: str, sections: Sequence[Section]) -> None:
  """report.html, which is self-contained; report.md, with its figures beside it."""
  (out / FIGURES).mkdir(parents=True, exist_ok=True)
  for f in _figures(sections):
    by_itself = f.svg.replace("<svg ", '<svg style="background: white" ', 1)
    write_atomically(out / FIGURES / f"{f.name}.svg", by_itself.encode())
  write_tables(out / TABLES, sections)
  write_atomically(out / "report.html", to_html(title, sections).encode())
  write_atomically(out / "report.md", to_markdown(title, sections).encode())


def write_tables(folder: pathlib.Path, sections: Sequence[Block]) -> None:
  """Every table as CSV and as LaTeX, named by its section and caption."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, table in named_tables(sections).items():
    for suffix, lines in (("csv", tables.csv_lines(table)), ("tex", tables.latex(table))):
      write_atomically(folder / f"{name}.{suffix}", "\n".join([*lines, ""]).encode())


def named_tables(blocks: Sequence[Block], prefix: str = "") -> dict[str, Table]:
  found: dict[str, Table] = {}
  for block in blocks:
    inner: dict[str, Table] = {}
    match block:
      case Grid(caption, table) if table.rows:
        inner = {_slug(f"{prefix} {caption}"): table}
      case Figures(drawn):
        inner = {_slug(f"{prefix} {f.name}"): f.values for f in drawn}
      case Folded():
        inner = named_tables(block.blocks, prefix)
      case Section(title):
        inner = named_tables(block.blocks, f"{prefix} {title}")
    for name, table in inner.items():
      same = sum(
        other == name or re.fullmatch(rf"{name}-\d+", other) is not None for other in found
      )
      found[f"{name}-{same + 1}" if same else name] = table
  return found


def _slug(text: str) -> str:
  return "-".join(re.findall(r"[\w.]+", text.lower()))[:100]


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
  for block in blocks:
    if isinstance(block, Figures):
      yield from block.figures
    elif isinstance(block, Section | Folded):
      yield from _figures(block.blocks)


# ---- Markdown ------------------------------------------------------------------------------------


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
  return "\n".join([f"# {title}", "", *_markdown(blocks, level=2)])


def _markdown(blocks: Sequence[Block], level: int) -> list[str]:
  lines: list[str] = []
  for block in blocks:
    match block:
      case Text(text) if text:
        lines += [text, ""]
      case Items(items) if items:
        lines += [*(f"- {item}" for item in items), ""]
      case Grid(caption, table) if table.rows:
        lines += [f"{caption}:", "", *tables.markdown(table)]
      case Figures(drawn):
        for f in drawn:
          lines += [f"![{f.caption}]({FIGURES}/{f.name}.svg)", "", f"{f.caption}.", ""]
          lines += _folded_markdown("values", tables.markdown(f.values))
      case Folded(summary) if inner := _markdown(block.blocks, level):
        lines += _folded_markdown(summary, inner)
      case Section(title) if inner := _markdown(block.blocks, level + 1):
        lines += [f"{'#' * level} {title}", "", *inner]
  return lines


def _folded_markdown(summary: str, lines: list[str]) -> list[str]:
  return [f"<details><summary>{html.escape(summary)}</summary>", "", *lines, "</details>", ""]


# ---- HTML ----------------------------------------------------------------------------------------

COLOURS = sorted({INK, MUTED, GRID, *(colour for colour, _ in STYLES.values())})


def style() -> str:
  """page.css, and the colours of the figures on a light and on a dark page."""
  light, dark = (
    "".join(f"--{c[1:].lower()}:{changed.get(c, c)};" for c in COLOURS) for changed in ({}, DARK)
  )
  sheet = pathlib.Path(__file__).with_name("page.css").read_text()
  return f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n{sheet}"


def to_html(title: str, sections: Sequence[Section]) -> str:
  present = [(s.title, lines) for s in sections if (lines := _html(s.blocks, level=3))]
  numbered = list(enumerate(present, 1))
  links = "".join(f'<li><a href="#s{n}">{_text(name)}</a></li>' for n, (name, _) in numbered)
  return "\n".join(
    [
      '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f"<title>{_text(title)}</title>\n<style>\n{style()}\n</style>\n</head>\n<body>",
      f'<header><h1>{_text(title)}</h1>\n<nav aria-label="Contents"><ul>{links}</ul></nav>',
      "</header>\n<main>",
      *(x for n, (name, lines) in numbered for x in _section(name, lines, 2, f' id="s{n}"')),
      "<footer>Made by scripts/report.py of NanoSAM.</footer>\n</main>\n</body>\n</html>\n",
    ]
  )


def _section(title: str, lines: list[str], level: int, attributes: str = "") -> list[str]:
  heading = f"<section{attributes}><h{level}>{_text(title)}</h{level}>"
  return [heading, *lines, "</section>"]


def _html(blocks: Sequence[Block], level: int) -> list[str]:
  lines: list[str] = []
  for block in blocks:
    match block:
      case Text(text) if text:
        lines.append(f"<p>{_text(text)}</p>")
      case Items(items) if items:
        lines.append(f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>")
      case Grid(caption, table) if table.rows:
        lines.append(_table(table, caption))
      case Figures(drawn) if drawn:
        lines.append(f'<div class="figures">{"".join(map(_figure, drawn))}</div>')
      case Folded(summary) if inner := _html(block.blocks, level):
        lines += [f"<details><summary>{_text(summary)}</summary>", *inner, "</details>"]
      case Section(title) if inner := _html(block.blocks, level + 1):
        lines += _section(title, inner, level)
  return lines


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
