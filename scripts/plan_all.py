"""Runs nanosam.plan for every size and method of the paper, and writes a table.

python scripts/plan_all.py --out=results/plan [--sizes=2M,23.9M] [--methods=adamw,sam]

Writes OUT.json and OUT.md after each compile; what is already in OUT.json is not compiled again.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

from nanosam.config import lookup
from nanosam.optim.methods import METHODS
from nanosam.study.tables import Table, markdown
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError
from nanosam.system.files import write_atomically, write_json

TOPOLOGIES = {
  **dict.fromkeys(("117.9M", "42.5M", "23.9M", "2M"), "v5e:2x2"),
  "1208M": "v5e:2x4",
}
PLANNED = "precond_func_sam,adamw,sam,precond_sam,func_sam,momentum_func_sam"


def main(argv: list[str]) -> None:
  p = Parser("scripts/plan_all.py", __doc__)
  p.add_argument("--out", required=True, type=pathlib.Path, help="without a suffix")
  p.add_argument("--sizes", default=",".join(TOPOLOGIES))
  p.add_argument("--methods", default=PLANNED)
  args = p.parse_args(argv[1:])
  methods, sizes = args.methods.split(","), args.sizes.split(",")
  for kind, names, known in (("method", methods, METHODS), ("size", sizes, TOPOLOGIES)):
    for name in names:
      lookup(kind, name, known)
  file = args.out.with_suffix(".json")
  file.parent.mkdir(parents=True, exist_ok=True)
  rows = json.loads(file.read_text()) if file.exists() else []
  for method in methods:
    for size in sizes:
      if any((row["size"], row["method"]) == (size, method) for row in rows):
        continue
      rows.append({"size": size, **plan(size, method)})
      write_json(file, rows)
      write_atomically(args.out.with_suffix(".md"), table(rows).encode())
      print(table(rows[-1:]).splitlines()[-1], flush=True)


def plan(size: str, method: str) -> dict[str, Any]:
  config = f"--config=configs/fixed_length.py:size={size},method={method}"
  command = [sys.executable, "-m", "nanosam.plan", config, f"--topology={TOPOLOGIES[size]}"]
  found = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
  if found.returncode:
    raise UserError(f"{size} with {method} could not be planned; the reason is above")
  return json.loads(found.stdout)


def table(rows: list[dict[str, Any]]) -> str:
  head = "size, method, chips, peak GiB, fits, FLOPs a step, hours at 40 %, compile s".split(", ")
  cells = [
    [
      *(r["size"], r["method"], r["topology"], f"{r['peak_bytes_per_device'] / 2**30:.2f}"),
      *("yes" if r["fits"] else "no", f"{r['flops_per_device'] * r['devices']:.3g}"),
      *(f"{r['hours']:.1f}", f"{r['compile_seconds']:.0f}"),
    ]
    for r in rows
  ]
  return "\n".join(markdown(Table(head, cells)))


if __name__ == "__main__":
  errors.run(main)
