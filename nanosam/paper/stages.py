"""Runs the stages of an experiment, or tells what they would cost."""

import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanosam.paper import protocol
from nanosam.paper.protocol import Lab
from nanosam.run.flops import DEVICES
from nanosam.study import backends, runs
from nanosam.study.backends import say
from nanosam.study.sweeps import Job

ENDED = (runs.FINISHED, runs.DIVERGED)  # a run that diverges is a result


def train(lab: Lab, stage: str, backend: str, parallel: int, argv: list[str]) -> bool:
  """Trains what is missing of a stage; False if the runs were queued and have yet to end."""
  for earlier in lab.stages[: lab.stages.index(stage)][:2]:  # those that tune
    if missing := backends.missing(lab.jobs(earlier), ENDED):
      say(f"warning: stage {earlier} is incomplete ({len(missing)} runs): {stage} builds on it")
  jobs = lab.jobs(stage)
  entry = {"command": argv, "experiment": lab.name, "stage": stage}
  record(lab.out, protocol.__doc__ or "", entry, jobs)
  say(f"{lab.name}, {lab.scale}, stage {stage}: {len(jobs)} runs")
  ended = backends.execute(jobs, backend, parallel, argv, ENDED)
  lab.forget()
  return ended


def record(out: pathlib.Path, protocol: str, entry: Mapping[str, Any], jobs: Sequence[Job]) -> None:
  """What is about to be run, on record before any result is known."""
  out.mkdir(parents=True, exist_ok=True)
  text = out / "protocol.md"
  if not text.exists():
    text.write_text(protocol)
  when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
  with open(out / "protocol.jsonl", "a") as f:
    f.write(json.dumps({"when": when, **entry, "runs": [job.id for job in jobs]}) + "\n")


def costs(lab: Lab, stages: Sequence[str], device: str | None, utilization: float) -> Iterator[str]:
  """Every run with its tokens and FLOPs, and for a device its hours; lines to print."""
  peak = DEVICES[device].peak * utilization if device else None
  yield f"{'run':<60}  {'tokens':>9}  {'FLOPs':>9}" + (f"  {device}-hours" if device else "")

  def line(name: str, tokens: float, cost: float) -> str:
    hours = f"  {cost / peak / 3600:>9.4g}" if peak else ""
    return f"{name:<60}  {tokens:>9.3g}  {cost:>9.3g}{hours}"

  sums: dict[str, tuple[int, float]] = {}  # the same run may occur in two stages
  for stage in stages:
    yield f"{stage}:"
    for job in lab.jobs(stage):
      cost = (
        protocol.step_flops(job.config, lab.outputs(job.config)) * job.config.opt.num_train_steps
      )
      sums[job.id] = job.tokens, cost
      yield line(f"  {job.id}", job.tokens, cost) + f"  {backends.state(job)}"
  tokens, cost = (sum(x) for x in zip(*sums.values(), strict=True))
  yield line(f"{len(sums)} different runs", tokens, cost)
  if device:
    yield f"hours of one {DEVICES[device].kind} at {utilization:.0%} of its peak"
  yield "FLOPs are those executed, recomputation (model.remat) included"
  yield "settings that a stage has yet to tune are placeholders, which cost the same"
