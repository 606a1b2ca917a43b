"""Turns files of text into a token store and a TFDS data set, without TensorFlow or Beam.

    python -m nanosam.data.prepare --input='c4/*.json.gz' --output=DIR --vocab_size=32000

Reads JSON lines, Parquet, TFRecord (tf.Example) and text, plain or gzipped, from files and folders.
A text file is one document unless --border says where documents end. Without --validation, some
documents are held out; a lone one is cut, and its end is for validation.

The same files and arguments give the same bytes, whatever the number of workers. After being
killed, the same command resumes and keeps the shards that are complete. In the end DIR holds

    store.json, tokenizer.model, train-00000.tokens, ...   the token store: data.source=tokens:DIR
    text/1.0.0/                  the texts in ArrayRecord form: tfds.builder_from_directory, or
                                 data.source=tfds:DIR, tokenised again on the fly
    prepare.json                 arguments, input files, summary, checksums of text/

and until then the chunks of the input files in unfinished/ (see chunking.py and worker.py).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanosam.data.preparation import formats, inputs, pipeline
from nanosam.data.preparation.assembly import describe
from nanosam.data.preparation.inputs import Arguments
from nanosam.data.store import MANIFEST
from nanosam.data.tokenizer import MODEL_TYPES
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import need


def main(argv: list[str]) -> None:
  prepare(parse(argv[1:]))


def prepare(a: Arguments) -> dict[str, Any]:
  out, started = Path(a.output).expanduser(), time.monotonic()
  done = (out / MANIFEST).exists()
  summary = pipeline.prepare(a)
  seconds = time.monotonic() - started
  print(f"{out} is already prepared" if done else f"prepared {out} in {seconds:.1f} s")
  print(describe(out, summary))
  return summary


def parse(argv: Sequence[str]) -> Arguments:
  what = "Turns files of text into a token store and a TFDS data set."
  p = Parser("python -m nanosam.data.prepare", what)
  many: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "GLOB"}
  borders = ", ".join((formats.WHOLE_FILE, *formats.BORDERS))
  add = p.add_argument
  add("--input", required=True, help="files of documents, gs:// too, or folders", **many)
  add("--output", required=True, metavar="DIR", help="local directory for the result")
  vocab = p.add_mutually_exclusive_group()
  size = Arguments.vocab_size
  vocab.add_argument(
    "--vocab_size", type=int, help=f"pieces to train ({size}, or fewer if there is little text)"
  )
  vocab.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model to use instead")
  add("--model_type", choices=MODEL_TYPES, default="unigram", help="(%(default)s)")
  add("--sample_bytes", type=int, default=20_000_000, help="text to train on (%(default)s)")
  add("--text_field", default="text", help="field or column (%(default)s)")
  add(
    "--border",
    default=formats.WHOLE_FILE,
    help=f"what ends a document in .txt: {borders}, or a marker such as '<|endoftext|>' "
    "(%(default)s)",
  )
  add("--validation", default=[], help="files for validation alone", **many)
  add(
    "--validation_fraction",
    type=float,
    help="of the documents, without --validation (0.01; of a lone one 0.1)",
  )
  add("--on_error", choices=("fail", "skip"), default="fail", help="(%(default)s)")
  add("--workers", type=int, default=pipeline.cores(), help="processes (all cores)")
  add("--shard_bytes", type=int, default=0, help="raw text in a shard; 0 = by the input's size")
  given = vars(p.parse_args(argv))
  given |= {"vocab_size": size, "may_be_smaller": True} if given["vocab_size"] is None else {}
  a = Arguments(**{"may_be_smaller": False, **given})
  fraction = inputs.validation_fraction(a)
  need(not (a.validation and fraction), "--validation and --validation_fraction exclude each other")
  need(a.validation or 0 < fraction < 1, f"--validation_fraction={fraction}: not in (0, 1)")
  need(a.workers >= 1, f"--workers={a.workers}: at least 1")
  need(a.shard_bytes >= 0, f"--shard_bytes={a.shard_bytes}: at least 0")
  need(a.sample_bytes >= 1, f"--sample_bytes={a.sample_bytes}: at least 1")
  need(a.border, "--border is empty: say file, line, blank_line or a marker")
  need("://" not in a.output, f"--output={a.output}: must be local; copy the result afterwards")
  return a


if __name__ == "__main__":
  errors.run(main)
