"""Finds the documents of a token store that a proxy learns late, and writes weights for training.

python -m nanosam.data.difficulty --workdir=PROXY --out=FILE [--source=tokens:DIR] [--steps=N,N,...]
  [--feature=trajectory|last|relative] [--choose=hard|easy|random] [--copies=2] [--seed=0]
  [--extra=FILE.jsonl]
python -m nanosam.train --config=... --config.data.weights=FILE

The proxy is any run, usually a smaller one and shorter. Its checkpoints give every document a loss
each; two clusters of these are the hard and the easy documents. The chosen ones are shown --copies
times an epoch, the others once; as many are chosen for `easy` and `random` as for `hard`, and if
more than half are hard, as many of them as there are easy ones. --extra adds documents that are not
in the store, such as rephrased ones. Losses are kept in scores-*/ beside FILE: weights by another
feature or choice cost nothing more, and a command that was killed resumes.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from nanosam import config as config_lib
from nanosam.data import clusters as clusters_lib
from nanosam.data.clusters import CHOICES, FEATURES, Described
from nanosam.data.preparation import formats
from nanosam.data.sources import StoreSource, source_of
from nanosam.data.store import Split
from nanosam.data.tokenizer import Tokenizer
from nanosam.data.weights import MAX_COPIES, Extra, Weights
from nanosam.run import record, restore
from nanosam.run.restore import Opened
from nanosam.run.scoring import UNTRAINED, Scores
from nanosam.study import figures, tables
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UsageError, UserError, need

EXAMPLES = 5  # documents of each cluster to show
_SHOWN_TOKENS = 60


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  need(1 <= args.copies <= MAX_COPIES, f"--copies={args.copies} must be from 1 to {MAX_COPIES}")
  figures.check_installed()
  proxy = restore.open_run(args.workdir)
  source = store_of(proxy, args.source)
  steps = chosen_steps(proxy, args)
  extra = read_extra(args.extra, source.tokenizer)
  out = pathlib.Path(args.out)
  scores = Scores(proxy, source, out.parent)
  before = [UNTRAINED] if args.feature == "relative" else []
  files = scores.of([*before, *steps])
  loss_DxK = clusters_lib.losses(files[len(before) :])
  untrained_D = np.load(files[0], mmap_mode="r") if before else None
  x_DxK = clusters_lib.features(loss_DxK, args.feature, untrained_D)
  found = clusters_lib.two_means(x_DxK)
  chosen_D = clusters_lib.choose(found.hard_D, args.choose, args.seed)
  described = clusters_lib.describe(loss_DxK, x_DxK, found, EXAMPLES)
  split = source.store.split("train")
  facts = {
    "store": source.fingerprint,
    **{name: getattr(args, name) for name in ("feature", "choose", "copies", "seed")},
    "steps": steps,
    "clusters": cluster_facts(split, found.hard_D, described),
    "centroids": dict(zip(("easy", "hard"), found.centroids.tolist(), strict=True)),
    "chosen": {"documents": int(chosen_D.sum()), "tokens": tokens_in(split, chosen_D)},
    "extra": {"documents": extra.num_documents, "tokens": extra.num_tokens},
    "proxy": lineage(args.workdir, proxy),
    "flops": {
      "proxy": proxy.checkpoints.read_run(steps[-1])["cost"]["compute"],
      "scoring": scores.flops() * len(files),
    },
  }
  proxy.checkpoints.close()
  copies_D = np.where(chosen_D, args.copies, 1).astype(np.uint8)
  weights = Weights(copies_D, found.hard_D, extra, facts)
  weights.save(epath.Path(out))
  print("\n".join([*table(facts), "", *listed(split, source.tokenizer, described)]))
  figures.trajectories(out, steps, described)
  print(f"written: {out} ({weights.hash}) and its picture; train with --config.data.weights={out}")


def parser() -> Parser:
  add = (p := Parser("python -m nanosam.data.difficulty", __doc__)).add_argument
  add("--workdir", required=True, help="of the proxy")
  add("--out", required=True, metavar="FILE", help="of the weights")
  add("--source", default="", help="a token store (default: the proxy's own)")
  add("--steps", default="", help="checkpoints of the proxy, comma-separated (default: all)")
  add("--feature", default="trajectory", choices=FEATURES, help="(default %(default)s)")
  add("--choose", default="hard", choices=CHOICES, help="what to repeat (default %(default)s)")
  add("--copies", type=int, default=2, help="of each in an epoch (default %(default)s)")
  add("--seed", type=int, default=0, help="of what is chosen at random")
  add("--extra", default="", metavar="FILE", help="documents to add, such as FILE.jsonl")
  return p


def store_of(proxy: Opened, name: str) -> StoreSource:
  """The store to score, if the proxy can read it."""
  own = proxy.config.data.source
  source = source_of(proxy.config.data, name or own)
  if not isinstance(source, StoreSource):
    raise UsageError(
      f"{name or own} is no token store: make one with python -m nanosam.data.prepare, and say "
      "--source=tokens:DIR"
    )
  need(
    source.coding == proxy.source.coding,
    f"{name} has another tokenizer than the proxy ({source.coding[:12]}; the proxy's: "
    f"{proxy.source.coding[:12]}): prepare that text with the one of {own}, or train a proxy on it",
  )
  return source


def chosen_steps(proxy: Opened, args: argparse.Namespace) -> list[int]:
  there = proxy.checkpoints.steps()
  more = (
    f"{args.workdir} has the checkpoints {', '.join(map(str, there))}: to keep more, train the "
    "proxy with --config.checkpoint_every_steps=N --config.max_to_keep=K"
  )
  words = [w for w in args.steps.split(",") if w]
  unknown = [w for w in words if not w.isdigit() or int(w) not in there]
  need(not unknown, f"there is no checkpoint {', '.join(unknown)}; {more}")
  steps = sorted({int(w) for w in words}) or there
  need(
    len(steps) > 1 or args.feature == "last",
    f"--feature={args.feature} needs two checkpoints or more; {more}, or use --feature=last",
  )
  return steps[-1:] if args.feature == "last" else steps


def read_extra(path: str, tokenizer: Tokenizer) -> Extra:
  if not path:
    return Extra.of([])
  documents = []
  for piece in formats.pieces(path, "text"):
    parsed = [piece] if isinstance(piece, formats.Problem) else formats.documents(piece, "text")
    for document in parsed:
      if isinstance(document, formats.Problem):
        raise UserError(f"--extra: {document}")
      ids = [tokenizer.bos_id, *tokenizer.encode(document.text), tokenizer.eos_id]
      documents.append((np.asarray(ids), len(document.utf8)))
  need(documents, f"--extra={path} holds no document")
  return Extra.of(documents)


def cluster_facts(
  split: Split, hard_D: np.ndarray, described: dict[str, Described]
) -> dict[str, dict[str, Any]]:
  return {
    name: {
      "documents": d.documents,
      "tokens": tokens_in(split, hard_D == (name == "hard")),
      "losses": d.mean_K.tolist(),
    }
    for name, d in described.items()
  }


def tokens_in(split: Split, chosen_D: np.ndarray) -> int:
  total = first = 0
  for documents in split.tables():
    total += int(documents[chosen_D[first : first + len(documents)], 0].sum(dtype=np.int64))
    first += len(documents)
  return total


def lineage(workdir: str, proxy: Opened) -> dict[str, Any]:
  """Where the losses come from."""
  _, environment = restore.stored_run(epath.Path(workdir))
  names = ("git_commit", "parameters", "data", "coding", record.LINEAGE, record.WEIGHTS)
  known = {name: environment[name] for name in names if name in environment}
  return {"workdir": workdir, **known, "config": config_lib.to_dict(proxy.config)}


def table(facts: dict[str, Any]) -> list[str]:
  """Both clusters, and what an epoch shows of them."""
  every = sum(c["documents"] for c in facts["clusters"].values())
  tokens = sum(c["tokens"] for c in facts["clusters"].values())
  rows = [
    [
      name,
      f"{c['documents']}",
      f"{c['documents'] / every:.1%}",
      f"{c['tokens']}",
      f"{c['tokens'] / tokens:.1%}",
      *(f"{loss:.3f}" for loss in c["losses"]),
    ]
    for name, c in facts["clusters"].items()
  ]
  head = ["", "documents", "share", "tokens", "share", *(f"loss at {s}" for s in facts["steps"])]
  chosen, extra, spent = facts["chosen"], facts["extra"], facts["flops"]
  lines = tables.plain(tables.Table(head, rows))
  lines.append(
    f"{chosen['documents']} documents ({facts['choose']}, {chosen['tokens']} tokens) are shown "
    f"{facts['copies']} times an epoch"
  )
  if extra["documents"]:
    lines.append(f"{extra['documents']} documents of {extra['tokens']} tokens are added")
  lines.append(f"FLOPs: the proxy {spent['proxy']:.3g}, scoring {spent['scoring']:.3g}")
  return lines


def listed(split: Split, tokenizer: Tokenizer, described: dict[str, Described]) -> list[str]:
  """The documents that are nearest to each centroid, with the beginnings of their texts."""
  lines = []
  for name, cluster in described.items():
    lines.append(f"typical {name} documents (number, last loss, text):")
    for document, losses in zip(cluster.typical, cluster.typical_losses, strict=True):
      text = tokenizer.decode(beginning(split, document)).split()
      lines.append(f"  {document:>8}  {losses[-1]:.3f}  {' '.join(text)[:70]}")
  return lines


def beginning(split: Split, document: int) -> Sequence[int]:
  """The first tokens of a document, without bos."""
  start = first = 0
  for documents in split.tables():
    if document < first + len(documents):
      start += int(documents[: document - first, 0].sum(dtype=np.int64))
      length = int(documents[document - first, 0])
      return split.read(start + 1, start + min(length - 1, _SHOWN_TOKENS)).tolist()
    first, start = first + len(documents), start + int(documents[:, 0].sum(dtype=np.int64))
  raise IndexError(document)


if __name__ == "__main__":
  errors.run(main)
