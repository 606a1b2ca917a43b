"""Which runs may be compared: those that differ only in what is compared, and in their seeds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanosam.run.record import WEIGHTS
from nanosam.study.runs import FINISHED, METHOD_FILE, Run
from nanosam.system.errors import UsageError, nearest

REPLICATE = ("seed", "data_seed")
# The data's fingerprint and the eval set are compared themselves; how often a run is evaluated, or
# warns, makes no difference.
NOT_COMPARED = {"data.source", "data.vocab_size", "data.repeat", "guard.spike"} | {
  f"eval_{name}" for name in ("every_steps", "steps", "batch_size", "rows")
}
# A key that differs in proportion to another which is compared does not differ by itself.
FOLLOWS = {
  "opt.init_learning_rate": "opt.peak_learning_rate",
  "opt.final_learning_rate": "opt.peak_learning_rate",
  "opt.rho_warmup_steps": "opt.warmup_steps",
  "opt.warmup_steps": "opt.num_train_steps",
  "model.F": "model.D",
}
Keys = Mapping[str, Any]


def differing_keys(a: Keys, b: Keys, varied: Iterable[str]) -> list[str]:
  """Settings, beyond `varied` and the seeds, in which two runs differ; a setting that one of the
  methods does not have does not count."""
  common = a.keys() & b.keys() - {*varied, *REPLICATE, *NOT_COMPARED}
  return sorted(k for k in common if a[k] != b[k] and not _follows(a, b, k))


def _follows(a: Keys, b: Keys, key: str) -> bool:
  """Whether a key differs only in proportion to its leader; steps may be rounded up or down."""
  if key == "init_from":  # runs of another seed may go on from other runs: those of their seed
    return bool(a[key] and b[key]) and any(a[k] != b[k] for k in REPLICATE)
  if key == METHOD_FILE:
    return a["opt.method"] != b["opt.method"]
  if key == "opt.perturbed_dtype":
    return a[key] == a["model.dtype"] and b[key] == b["model.dtype"]
  leader = FOLLOWS.get(key)
  if leader is None or a[leader] == b[leader]:
    return False
  small, large = sorted((a, b), key=lambda keys: keys[leader])
  expected = large[key] * small[leader] / large[leader]
  tolerance = 1 if isinstance(small[key], int) else 1e-6 * abs(expected)
  return abs(small[key] - expected) <= tolerance


def check_comparable(runs: Sequence[Run], varied: Iterable[str]) -> None:
  varied = set(varied)
  for key in varied - set(REPLICATE):
    known = {k for r in runs for k in r.keys}
    if key not in known:
      raise UsageError(f"no run has a setting '{key}': {nearest(key, sorted(known))}")
  # A run that lacks some setting (adamw has no rho) agrees with all, so every pair is checked.
  for i, a in enumerate(runs):
    for b in runs[:i]:
      if keys := differing_keys(b.keys, a.keys, varied):
        what = "; ".join(
          f"{k} is {_value(b, k)} in {b.path}, {_value(a, k)} in {a.path}" for k in keys
        )
        raise UsageError(
          f"these runs differ in more than {', '.join(sorted(varied))} and seeds: {what}. Compare "
          f"by it (--by=...,{keys[0]}), tune over it (--tune=...,{keys[0]}), or leave runs out"
        )
  for run in runs[1:]:
    if what := _data_difference(runs[0], run):
      raise UsageError(f"{runs[0].path} and {run.path} {what}")


def _value(run: Run, key: str) -> Any:
  return run.lineage if key == "init_from" and run.lineage else run.keys[key]


def _data_difference(a: Run, b: Run) -> str:
  for name, what in (("data", "data"), ("eval_set", "eval set")):
    one, other = a.environment.get(name), b.environment.get(name)
    if one != other:
      return (
        f"have different {what}: {one} and {other}; their losses do not compare. Train them again "
        "on the same"
      )
  one, other = (r.environment.get(WEIGHTS, {}).get("hash") for r in (a, b))
  if a.keys["data.weights"] == b.keys["data.weights"] and one != other:
    return (
      f"have one name of weights, {a.keys['data.weights']}, and two contents: {one} and {other}; "
      "train them again with one file"
    )
  if a.state == b.state == FINISHED and not np.array_equal(a.weight_R, b.weight_R):
    return "were evaluated on different sequences; train them again with one eval set"
  return ""


def comparable_sets(runs: Iterable[Run], varied: Iterable[str]) -> list[list[Run]]:
  """Sets of runs that may be compared with each other, whatever their `varied` keys.

  A run that lacks some settings (adamw perturbs nothing) belongs to every set it agrees with.
  """
  varied = set(varied)
  found: list[list[Run]] = []
  for run in sorted(runs, key=lambda r: -len(r.keys)):
    fitting = [
      members
      for members in found
      if not any(
        differing_keys(run.keys, x.keys, varied) or _data_difference(run, x) for x in members
      )
    ]
    for members in fitting:
      members.append(run)
    if not fitting:
      found.append([run])
  return found
