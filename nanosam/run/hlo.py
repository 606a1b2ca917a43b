"""Reads a compiled program's text: what its collectives move.

A loop's body counts as often as it runs. Of a collective we count the whole array: what an
all-gather makes, what a reduction reduces. On a ring a device sends and receives about that much
(an all-reduce twice).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.-]+)")
_SIDES = re.compile(r"\b(?:true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
_LIMIT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_PIECES = ("fused_computation", "async_collective_fusion")  # names of computations
_GROUPS = re.compile(r"\breplica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})")


class Collective(NamedTuple):
  kind: str
  bytes: float  # in one run of the program
  channel: str  # its name, if the compiler may have spread it over several instructions


def collective_bytes(text: str) -> dict[str, int]:
  """What the collectives of a compiled program, `compiled.as_text()`, move, by kind."""
  computations, entry = _computations(text)
  found = enumerate(_walk(computations, entry))
  total: Counter[str] = Counter()
  for collective in {(c.channel, 0 if c.channel else n): c for n, c in found}.values():
    total[collective.kind] += int(collective.bytes)
  return dict(total)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  computations: dict[str, list[str]] = {}
  lines: list[str] = []
  entry = ""
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      computations[start[1]] = lines = []
      if line.startswith("ENTRY"):
        entry = start[1]
    else:
      lines.append(line)
  return computations, entry


def _walk(computations: dict[str, list[str]], name: str) -> Iterator[Collective]:
  for line in computations[name]:
    if not (found := _INSTRUCTION.match(line)):
      continue
    shape, op, rest = found.groups()
    kind = op.removesuffix("-start")
    if kind in KINDS:  # what a reduction applies is a sum of two numbers: no need to look inside
      channel = _CHANNEL.search(rest) if name.startswith(_PIECES) else None
      size = _bytes(kind, shape, rest, started=kind != op)
      if name.startswith("all-reduce-scatter"):  # what TPUs have for a reduce-scatter
        kind = "reduce-scatter"
      yield Collective(kind, size, channel[1] if channel else "")
    elif op == "conditional":
      branches = [list(_walk(computations, branch)) for branch in _branches(rest)]
      yield from max(branches, key=lambda found: sum(c.bytes for c in found))
    elif op not in ("async-update", "async-done"):  # these name what async-start has called
      inside = [c for called in _CALLED.findall(rest) for c in _walk(computations, called)]
      trips = _trips(computations, rest) if op == "while" and inside else 1
      yield from (c._replace(bytes=c.bytes * trips) for c in inside)


def _trips(computations: dict[str, list[str]], rest: str) -> int:
  """How often a loop runs: noted beside it, or what its counter is compared with."""
  if noted := _TRIPS.search(rest):
    return int(noted[1])
  condition = _CONDITION.search(rest)
  lines = computations[condition[1]] if condition else []
  limits = [m[1] for line in lines if (m := _LIMIT.search(line))]
  if len(limits) != 1:
    raise ValueError(f"a loop that does not say how often it runs: {rest[:200]}")
  return int(limits[0])


def _branches(rest: str) -> list[str]:
  named = _BRANCHES.search(rest)
  return re.findall(r"[\w.-]+", named[1]) if named else _SIDES.findall(rest)


def _bytes(kind: str, shape: str, rest: str, started: bool) -> float:
  """Of the whole arrays."""
  arrays = _ARRAY.findall(shape)  # type and dimensions of each
  if started and kind in ("all-gather", "collective-permute"):  # (operands, results, contexts)
    arrays = [(t, dims) for t, dims in arrays if dims]
    arrays = arrays[len(arrays) // 2 :]
  total = sum(_width(t) * math.prod(map(int, filter(None, dims.split(",")))) for t, dims in arrays)
  group = _GROUPS.search(rest)
  if kind == "reduce-scatter" and group:
    total *= int(group[1]) if group[1] else len(group[2].split(","))
  return total


def _width(kind: str) -> float:
  """Bytes of one element: bf16 2, pred 1, s4 one half."""
  bits = re.search(r"\d+", kind)
  return int(bits[0]) / 8 if bits else 1
