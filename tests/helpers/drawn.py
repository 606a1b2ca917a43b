"""What a figure shows: its words and its lines, read back from the files that were written."""

import pathlib
import re
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib.colors
import matplotlib.image
import numpy as np

SVG = "{http://www.w3.org/2000/svg}"


class Line(NamedTuple):
  colour: str
  x: np.ndarray  # on the page
  y: np.ndarray  # up is more

  def follows(self, values) -> bool:
    """Whether its height goes by these values, whatever the scale of the axis."""
    return len(self.y) == len(values) and np.corrcoef(self.y, values)[0, 1] > 0.9999


class Drawn(NamedTuple):
  words: list[str]  # of titles, axes, ticks and legends; formulas without their spaces
  lines: list[Line]  # of all panels; a line of one point is a marker

  def of(self, colour: str) -> list[Line]:
    return [line for line in self.lines if line.colour == colour.lower()]


def read_figure(stem: pathlib.Path) -> Drawn:
  """STEM.svg; STEM.png must be a picture of the same shape with every line's colour in it."""
  root = ElementTree.parse(stem.with_name(stem.name + ".svg")).getroot()
  words = ["".join(part.strip() for part in t.itertext()) for t in root.iter(f"{SVG}text")]
  axes = [g for g in root.iter(f"{SVG}g") if g.get("id", "").startswith("axes_")]
  # The grid, the ticks and the legend lie deeper.
  groups = [g for a in axes for g in a if g.get("id", "").startswith("line2d_")]
  found = Drawn(words, [_line(g) for g in groups])
  picture = matplotlib.image.imread(stem.with_name(stem.name + ".png"))[..., :3]
  height, width = picture.shape[:2]
  _, _, *size = map(float, root.get("viewBox").split())
  assert abs(height / width - size[1] / size[0]) < 0.01
  for colour in {line.colour for line in found.lines}:
    assert np.any(np.all(np.abs(picture - matplotlib.colors.to_rgb(colour)) < 0.01, axis=-1)), (
      colour
    )
  return found


def _line(group: ElementTree.Element) -> Line:
  path, markers = group.find(f"{SVG}path"), [*group.iter(f"{SVG}use")]
  if path is not None:
    points = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
    style = path.get("style", "")
  else:
    points = [(m.get("x"), m.get("y")) for m in markers]
    style = markers[0].get("style", "")
  x, y = np.array(points, float).T
  return Line(re.findall(r"stroke: (#\w+)", style)[0], x, -y)
