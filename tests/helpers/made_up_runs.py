"""A study of made-up runs as training leaves them, for what reads them: 50 of them in a second."""

import json
import math

import numpy as np

from helpers.training import ROOT
from nanosam import config
from nanosam.study import runs

ROWS, LENGTH = 60, 128

METHODS = ("adamw", "sam", "precond_sam", "func_sam", "precond_func_sam", "momentum_func_sam")
RHOS = (0.01, 0.03, 0.1, 0.3)
# Final loss at the best rho minus AdamW's; that rho; cost of a step to AdamW's.
LIKE = {
  "adamw": (0.0, 0.0, 1.0),
  "sam": (0.01, 0.01, 2.0),
  "precond_sam": (-0.01, 0.1, 2.0),
  "func_sam": (-0.02, 0.03, 2.0),
  "precond_func_sam": (-0.04, 0.1, 2.0),
  "momentum_func_sam": (-0.005, 0.03, 1.1),
}


def write_run(
  folder, method="adamw", seed=1, loss=3.5, keys=None, env=None, seq=None, curve=None, spec=None
):
  """A finished run with the given loss; `curve` maps steps to eval losses."""
  c = config.load(spec or f"{ROOT}/configs/mini.py:method={method},width=64,steps=1200")
  overrides = {"opt.rho": 0.1} if method != "adamw" else {}
  for key, value in {"seed": seed, "data_seed": seed, **overrides, **(keys or {})}.items():
    config.override(c, key, str(value))
  steps = c.opt.num_train_steps
  env = {"data": "d1", "eval_set": {"sequences": ROWS, "documents": 2 * ROWS}, **(env or {})}
  settings = config.to_dict(c)
  workdir = folder / runs.run_id(settings)
  workdir.mkdir(parents=True)
  (workdir / "config.json").write_text(json.dumps({**settings, "environment": env}))
  nll = (np.full(ROWS, loss) if seq is None else seq) * LENGTH
  np.savez(workdir / "eval_sequences.npz", step=steps, nll=nll, weight=np.full(ROWS, LENGTH))
  curve = curve or {steps // 2: nll.mean() / LENGTH + 1, steps: nll.mean() / LENGTH}
  cost = 1 if method == "adamw" else 2
  records = [
    {"step": s, "eval/loss": y, "tokens": s, "compute": s * cost, "time": 3 * s * cost}
    for s, y in curve.items()
  ]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  return workdir


def write_study(folder, methods=METHODS, seeds=(1, 2, 3), rhos=RHOS, keys=None):
  """Every rho on the first seed, the best on all: 6 methods, 4 rhos and 3 seeds make 33 runs."""
  written = []
  for method in methods:
    best = LIKE[method][1]
    for seed in seeds:
      for rho in (0.0,) if method == "adamw" else rhos:
        if seed == seeds[0] or rho in (best, 0.0):
          written.append(write_full_run(folder, method, seed, rho, keys))
  return written


def write_full_run(folder, method, seed, rho, keys=None):
  shift, best, cost = LIKE[method]
  rng = np.random.default_rng([seed, METHODS.index(method), round(1000 * rho)])
  shared = np.random.default_rng(seed)
  final = 3.9 + shift + 0.01 * shared.normal()
  if rho:
    final += 0.02 * math.log10(rho / best) ** 2
  sequences = final + 0.5 * shared.normal(size=ROWS) + 0.02 * rng.normal(size=ROWS)
  more = {"opt.rho": rho} if rho else {}
  env = {
    "parameters": 735_104,
    "git_commit": "0" * 40,
    "devices": {"kind": "cpu", "count": 1, "processes": 1},
  }
  workdir = write_run(folder, method, seed, seq=sequences, keys={**more, **(keys or {})}, env=env)
  settings = json.loads((workdir / "config.json").read_text())
  steps, every = settings["opt"]["num_train_steps"], settings["eval_every_steps"]
  records = []
  for step in [1, *range(10, steps + 1, 10)]:
    records.append(train_record(step, steps, final, cost, rho, rng))
    if step % every == 0 or step == steps:
      records.append(eval_record(step, steps, sequences, cost))
  lines = "".join(json.dumps(r) + "\n" for r in records)
  (workdir / "metrics.jsonl").write_text(lines)
  return workdir


def spent(step, cost):
  return {"tokens": step * 16_384, "compute": step * 7.1e10 * cost, "time": step * 0.21 * cost}


def train_record(step, steps, final, cost, rho, rng):
  loss = final + 5 * math.exp(-6 * step / steps) + 0.02 * rng.normal()
  record = {
    "step": step,
    "train/loss": loss,
    "opt/lr": 6e-3,
    "opt/rho": rho,
    "opt/grad_norm": 0.3,
    "opt/eps_norm": rho,
    "guard/nonfinite": 0,
    **{f"grad_norm/block_{i}": 0.1 for i in range(3)},
    **spent(step, cost),
    "perf/tokens_per_sec": 78_000 / cost,
    "perf/step_time": 0.21 * cost * (1 + 0.05 * rng.random()),
    "perf/data_wait": 1e-4,
    "data/epoch": step / steps,
    "data/batch_hash": "0123456789abcdef",
  }
  if not rho and step % 100 == 0:
    record |= {"tau/logit": 1.1, "tau/func": 0.1, "tau/cross": -0.2 + 0.01 * rng.random()}
  return record


def eval_record(step, steps, sequences, cost):
  loss = float(sequences.mean()) + (4 * math.exp(-5 * step / steps) if step < steps else 0)
  sem = float(sequences.std() / math.sqrt(ROWS))
  return {
    "step": step,
    "eval/loss": loss,
    "eval/loss_sem": sem,
    "eval/bits_per_byte": loss / math.log(2) / 4,
    **spent(step, cost),
  }
