"""Decides what is held out for validation, before anything is written.

A document is for validation by a hash of its text (worker.Rules). Where that would leave a split
without any, the documents with the smallest hashes are held out; a lone document is cut in two.
"""

import dataclasses

from nanosam.data.preparation import formats
from nanosam.data.preparation.inputs import Input
from nanosam.data.preparation.worker import PLACES, SPLITS, Problems, Rules, place
from nanosam.system.errors import UsageError, UserError, say

_LAST_PART = 0.1  # of a lone document, and no more than the next line says
_LAST_CHARS = 200_000
_NEAR = 1000  # characters before a cut in which a line may end
_MARKER = "<|endoftext|>"


def decide(inputs: list[Input], rules: Rules, fraction: float | None) -> Rules:
  """Rules that leave no split empty; `fraction` is what was asked for, if anything was.

  Reads until each split has a document, which of a large corpus is its beginning.
  """
  missing, problems = {*SPLITS}, Problems(rules.on_error)
  sizes: dict[int, int] = {}  # bytes of each document by its place
  lone: formats.Document | None = None
  for file in inputs:
    if file.split and file.split not in missing:
      continue
    for piece in problems.without(rules.pieces(file.path)):
      for document in problems.without(formats.documents(piece, rules.text_field)):
        missing.discard(file.split or rules.split_of(document))
        if not missing:
          return rules
        if not file.split:
          sizes[place(document)] = len(document.utf8)
          lone = document if len(sizes) == 1 else None
      if file.split and file.split not in missing:
        break
  first = f" ({problems.first[0]})" if problems.first else ""
  if any(file.split for file in inputs) or not sizes:
    purpose = "train" if "train" in missing else "validate"
    raise UserError(f"there are no documents to {purpose} on{first}; use other files")
  if lone:
    return _cut(lone, rules, fraction)
  return _hold_out(sizes, rules)


def _hold_out(sizes: dict[int, int], rules: Rules) -> Rules:
  """The documents with the smallest hashes, until they have their share of the bytes."""
  order, total = sorted(sizes), sum(sizes.values())
  count, held = 1, sizes[order[0]]
  while held < rules.validation_fraction * total and count < len(order) - 1:
    held += sizes[order[count]]
    count += 1
  say(f"of only {len(order)} documents, {count} with {held / total:.1%} of the text validate")
  between = (order[count - 1] + order[count]) / 2 / PLACES
  return dataclasses.replace(rules, validation_fraction=between)


def _cut(document: formats.Document, rules: Rules, fraction: float | None) -> Rules:
  text = document.text
  held = (
    round(len(text) * fraction) if fraction else min(round(len(text) * _LAST_PART), _LAST_CHARS)
  )
  cut = len(text) - held
  cut = text.rfind("\n", max(0, cut - _NEAR), cut) + 1 or cut
  if not text[:cut].strip() or not text[cut:].strip():
    raise UsageError(
      f"the only document has {len(text)} characters, too few to hold some out for validation: "
      "add text, or name a file with --validation"
    )
  say(
    f"there is one document: its last {len(text) - cut:,} characters of {len(text):,} are for "
    "validation"
  )
  if _MARKER in text:
    say(f"it contains {_MARKER}: with --border='{_MARKER}', each part would be a document")
  return dataclasses.replace(rules, cut=cut)
