"""Compiles a config's train step for devices you do not have: does it fit, and what will it cost?

python -m nanosam.plan --config=FILE.py[:k=v,...] [--config.KEY=VALUE ...] --topology=v5e:2x4
  [--vocab_size=32101] [--peak=FLOP/s] [--utilization=0.4] [--json]

The program is the one that trains, compiled by the devices' own compiler; nothing is executed, no
data is read. cpu:8 is this machine as eight devices. Bytes and FLOPs are per device and step, with
loops counted as often as they run.

gpu:A100-80GB and others are estimated from the compile for this CPU (nanosam/run/gpus.py), next to
what JAX takes of such a GPU's memory: 75 %. No GPU has confirmed these figures.
"""

import json
from typing import Any

import ml_collections

from nanosam import config as config_lib
from nanosam.data.weights import read_weights
from nanosam.run import flops, gpus
from nanosam.run.footprint import GIB, REMEDIES, devices_of, known_topologies, measure
from nanosam.run.validate import validate
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import need


def main(argv: list[str]) -> None:
  args, rest = parser().parse_known_args(argv[1:])
  c = config_lib.from_command_line([argv[0], *rest])
  c.workdir = c.workdir or "unused"
  validate(c)
  good = 0 < args.utilization <= 1 and (args.peak or 1) > 0
  need(good, "--utilization must be in (0, 1], and --peak above 0")
  devices, hbm_bytes = devices_of(args.topology)
  facts = measure(c, args.vocab_size or outputs(c), devices, hbm_bytes, args.topology)
  facts |= run_cost(c, facts, args.peak, args.utilization)
  print(json.dumps(facts, indent=2) if args.json else report(c, facts))


def outputs(c: ml_collections.ConfigDict) -> int:
  """Pieces of the vocabulary, or classes, if nobody says so: the data may not be here yet."""
  known = c.data.classes or {"embedded": c.data.vocab_size, "digits": 10}.get(c.data.source)
  need(
    known or c.model.kind == "decoder",
    f"how many classes {c.data.source} has is known once it is read: say --vocab_size=CLASSES",
  )
  return known or config_lib.PAPER_VOCABULARY


def parser() -> Parser:
  add = (p := Parser("python -m nanosam.plan", __doc__)).add_argument
  add("--topology", required=True, help=f"{known_topologies()}")
  add(
    "--vocab_size",
    type=int,
    help="or classes (default: the embedded data's own, or the reference's)",
  )
  add("--peak", type=float, help="FLOP/s of a device (default: its data sheet's)")
  add("--utilization", type=float, default=0.4, help="of the peak (default 0.4)")
  add("--json", action="store_true")
  return p


def run_cost(
  c: ml_collections.ConfigDict, facts: dict[str, Any], peak: float | None, utilization: float
) -> dict[str, Any]:
  """Of the whole run, at `utilization` of `peak` FLOP/s; nothing if the peak is unknown."""
  gpu = gpus.GPUS.get(facts["topology"].partition(":")[2])
  peak = peak or (gpu.peak if gpu else flops.peak_flops(facts["device_kind"]))
  if peak is None:
    return {}
  hours = c.opt.num_train_steps * facts["flops_per_device"] / (peak * utilization) / 3600
  before = {}
  if c.data.weights:
    spent = read_weights(c.data.weights).flops
    before = {"weights_flops": spent}
    before["weights_chip_hours"] = spent / (peak * utilization) / 3600
  return {
    **before,
    "num_train_steps": c.opt.num_train_steps,
    "peak": peak,
    "utilization": utilization,
    "hours": hours,
    "chip_hours": hours * facts["devices"],
  }


def report(c: ml_collections.ConfigDict, facts: dict[str, Any]) -> str:
  def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"

  mesh = " x ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())
  moved = facts["collective_bytes_by_kind"]
  collectives = "unknown" if moved is None else ", ".join(f"{k} {gib(v)}" for k, v in moved.items())
  peak, memory = facts["peak_bytes_per_device"], facts["hbm_bytes_per_device"]
  at_peak = gib(peak)
  if "estimate" in facts:
    at_peak = " to ".join(map(gib, facts["peak_bytes_range"])) + " (an estimate)"
  lines = [
    f"{facts['method']}, {facts['parameters'] / 1e6:.1f}M parameters, vocabulary "
    f"{facts['vocab_size']}, batch {c.batch_size} x {c.model.L} in {c.grad_accumulation_steps} "
    "part(s)",
    f"{facts['topology']}: {facts['devices']} x {facts['device_kind']}, mesh {mesh}",
    "a step, on each device:",
    f"  arguments    {gib(facts['argument_bytes_per_device'])}"
    + (
      f", of which {gib(memory_of_method)} is what {facts['method']} remembers"
      if (memory_of_method := facts["memory_of_method_bytes_per_device"])
      else ""
    ),
    f"  temporaries  {gib(facts['temp_bytes_per_device'])}",
    f"  peak         {at_peak} of {gib(memory)}: "
    + ("fits" if facts["fits"] else f"DOES NOT FIT; {REMEDIES}"),
    f"  FLOPs        {facts['flops_per_device']:.4g}",
    f"  collectives  {collectives or 'none'}",
    f"compiled in {facts['compile_seconds']:.0f} s",
  ]
  if "hours" in facts:
    lines.append(
      f"{facts['num_train_steps']} steps at {facts['utilization']:.0%} of {facts['peak']:.3g} "
      f"FLOP/s: {facts['hours']:.1f} hours, {facts['chip_hours']:.1f} chip-hours"
    )
  if "weights_flops" in facts:
    lines.append(
      f"before that, the proxy and the scoring behind data.weights: {facts['weights_flops']:.4g} "
      f"FLOPs, {facts['weights_chip_hours']:.1f} chip-hours"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  errors.run(main)
