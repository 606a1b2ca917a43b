"""A file or folder of text as a token store, prepared on first use."""

import hashlib
import json
from pathlib import Path

from nanosam.data.preparation import pipeline
from nanosam.data.preparation.inputs import Arguments, make_plan
from nanosam.data.store import MANIFEST
from nanosam.system.errors import say


def build_text(
  place: str, cache_dir: Path, *, vocab_size: int, tokenizer: str, text_field: str, border: str
) -> Path:
  """The directory of the store, as `prepare` makes it with its own defaults."""

  def arguments(output: str) -> Arguments:
    return Arguments(
      input=[place],
      output=output,
      vocab_size=vocab_size,
      tokenizer=tokenizer or None,
      text_field=text_field,
      border=border,
      workers=pipeline.cores(),
    )

  plan = make_plan(arguments("")).to_json()  # with size and time of each file
  key = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
  final = cache_dir.expanduser() / f"text-{Path(place).stem}-{key}"
  if not (final / MANIFEST).exists():
    say(f"preparing {place} in {final} (once) ...")
    pipeline.prepare(arguments(str(final)), wait=True)
  return final
