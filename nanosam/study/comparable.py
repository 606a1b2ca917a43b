"""Which runs may be compared: those that differ in what is compared, and by seed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanosam import config as config_lib
from nanosam.study.runs import FINISHED, Run
from nanosam.system.errors import UsageError

REPLICATE = ("seed", "data_seed")
# The data's fingerprint and the eval set are compared themselves; how often to look is no matter.
NOT_COMPARED = {"data.source", "data.vocab_size", "data.repeat", "guard.spike"} | {
  f"eval_{name}" for name in ("every_steps", "steps", "batch_size")
}
# A key that differs in proportion to another which is compared does not differ by itself.
FOLLOWS = {
  "opt.init_learning_rate": "opt.peak_learning_rate",
  "opt.final_learning_rate": "opt.peak_learning_rate",
  "opt.rho_warmup_steps": "opt.warmup_steps",
  "opt.warmup_steps": "opt.num_train_steps",
  "model.F": "model.D",
}


def differing_keys(a: Run, b: Run, varied: Iterable[str]) -> list[str]:
  """Settings, beyond `varied` and the seeds, in which two runs differ; a setting that one of the
  methods does not have is none."""
  common = a.keys.keys() & b.keys.keys() - {*varied, *REPLICATE, *NOT_COMPARED}
  return sorted(k for k in common if a.keys[k] != b.keys[k] and not _follows(a.keys, b.keys, k))


def _follows(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> bool:
  """Whether a key differs only as its leader does: counts of steps to the nearest, or next."""
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
      raise UsageError(f"no run has a setting '{key}': {config_lib.nearest(key, sorted(known))}")
  # A run without some setting (adamw has no rho) compares with all: so every pair is looked at.
  for i, a in enumerate(runs):
    for b in runs[:i]:
      if keys := differing_keys(b, a, varied):
        what = "; ".join(f"{k} is {b.keys[k]} in {b.path}, {a.keys[k]} in {a.path}" for k in keys)
        raise UsageError(
          f"these runs differ in more than {', '.join(sorted(varied))} and seeds: {what}. Compare "
          f"by it (--by=...,{keys[0]}), tune over it (--tune=...,{keys[0]}), or leave runs out"
        )
  first = runs[0]
  for run in runs[1:]:
    _check_same_data(first, run)


def _check_same_data(a: Run, b: Run) -> None:
  if what := _data_difference(a, b):
    raise UsageError(f"{a.path} and {b.path} {what}")


def _data_difference(a: Run, b: Run) -> str:
  for name, what in (("data", "data"), ("eval_set", "eval set")):
    one, other = a.environment.get(name), b.environment.get(name)
    if one != other:
      return (
        f"have different {what}: {one} and {other}; their losses do not compare. Train them again "
        "on the same"
      )
  if a.state == b.state == FINISHED and not np.array_equal(a.weight_R, b.weight_R):
    return "were evaluated on different sequences; train them again with one eval set"
  return ""


def families(runs: Iterable[Run], varied: Iterable[str]) -> list[list[Run]]:
  """Sorts runs so that those of one family may be compared, whatever their `varied` keys.

  A run that lacks some settings (adamw perturbs nothing) belongs to every family it agrees with.
  """
  varied = set(varied)
  found: list[list[Run]] = []
  for run in sorted(runs, key=lambda r: -len(r.keys)):
    mine = [
      family
      for family in found
      if not any(differing_keys(run, x, varied) or _data_difference(run, x) for x in family)
    ]
    for family in mine:
      family.append(run)
    if not mine:
      found.append([run])
  return found
