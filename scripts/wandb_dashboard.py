"""Makes a W&B dashboard of a project's runs: eval loss by method, rho, taus, guards, speed.

python scripts/wandb_dashboard.py [--entity=NAME] [--project=nanosam] [--dry_run]

Runs are grouped by method and rho, so a line is a mean over seeds and its band their range; every
method has the colour it has in our figures. --dry_run prints the specification as JSON and needs
neither network nor account.
"""

import json
from typing import Any

from nanosam import config as config_lib
from nanosam.optim.methods import METHODS
from nanosam.study import plots
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError, first_line

AXES = {"step": "steps", "tokens": "tokens", "compute": "FLOPs", "time": "training time (s)"}
# Metrics by section; each list of metrics is a panel.
LINES = {
  "Curvature: taus": {
    "Along the gradient": ["tau/logit", "tau/func", "tau/cross"],
    "Along the preconditioned gradient": [
      "tau_precond/logit",
      "tau_precond/func",
      "tau_precond/cross",
    ],
  },
  "Guards": {
    "Steps with a loss or gradient that is not finite": ["guard/nonfinite"],
    "Steps whose second pass alone is not finite": ["guard/perturbed_nonfinite"],
    "Steps without a perturbation": ["guard/no_perturbation"],
  },
  "Training": {
    "Training loss": ["train/loss"],
    "Training loss at the perturbed point": ["train/loss_perturbed"],
    "Learning rate": ["opt/lr"],
    "Rho": ["opt/rho"],
    "Length of the perturbation": ["opt/eps_norm"],
    "Norm of the gradient": ["opt/grad_norm"],
  },
  "Speed": {
    "Tokens a second": ["perf/tokens_per_sec"],
    "Seconds a step": ["perf/step_time"],
    "Waiting for data, seconds a step": ["perf/data_wait"],
    "Share of the devices' peak": ["perf/utilization"],
  },
}


def main(argv: list[str]) -> None:
  p = Parser("scripts/wandb_dashboard.py", __doc__)
  p.add_argument("--entity", default="", help="user or team (default: your own)")
  p.add_argument("--project", default=config_lib.default().wandb.project)
  p.add_argument("--dry_run", action="store_true", help="print the specification")
  args = p.parse_args(argv[1:])
  if args.dry_run:
    print(json.dumps(specification(args.entity, args.project), indent=2))
    return
  import wandb

  try:
    entity = args.entity or wandb.Api().default_entity or ""
    url = workspace(entity, args.project).save().url
  except (wandb.Error, ValueError, OSError) as e:
    raise UserError(f"W&B did not take the dashboard ({first_line(e)}); try `wandb login`") from e
  print(f"saved: {url}")


def specification(entity: str, project: str) -> dict[str, Any]:
  return workspace(entity, project)._spec  # what save() sends; the package has no other way to see


def workspace(entity: str, project: str) -> Any:
  try:
    import wandb_workspaces.workspaces as ws
  except ImportError:
    raise UserError("the dashboard needs wandb-workspaces: pip install -e '.[report]'") from None
  from wandb_workspaces import expr

  lines = [
    ws.Section(name, panels=[_lines(title, y) for title, y in panels.items()])
    for name, panels in LINES.items()
  ]
  return ws.Workspace(
    entity=entity,
    project=project,
    name="NanoSAM",
    sections=[
      ws.Section("Eval loss by method", panels=_eval_panels(), is_open=True),
      ws.Section("Loss against rho", panels=_rho_panels(), is_open=True),
      *lines,
    ],
    settings=ws.WorkspaceSettings(x_axis="step", max_runs=50),
    runset_settings=ws.RunsetSettings(
      groupby=[expr.Config("opt.method"), expr.Config("opt.rho")],
      order=[expr.Ordering(expr.Summary("last_eval_loss"), ascending=True)],
      group_colors={method: plots.STYLES.get(method, plots.OTHER)[0] for method in METHODS},
      pinned_columns=["summary:last_eval_loss", "summary:best_eval_loss", "config:seed.value"],
    ),
  )


def _lines(title: str, y: list[str], x: str = "step") -> Any:
  import wandb_workspaces.reports.v2 as wr

  return wr.LinePlot(
    title=title,
    x=x,
    y=[*y],
    title_x=AXES[x],
    groupby_aggfunc="mean",
    groupby_rangefunc="minmax",
    max_runs_to_show=50,
  )


def _eval_panels() -> list[Any]:
  panels = [_lines(f"Eval loss against {name}", ["eval/loss"], x) for x, name in AXES.items()]
  return [*panels, _lines("Bits per byte", ["eval/bits_per_byte"])]


def _rho_panels() -> list[Any]:
  import wandb_workspaces.reports.v2 as wr

  loss = wr.SummaryMetric("last_eval_loss")
  keys = ("opt.method", "opt.rho", "opt.peak_learning_rate", "opt.weight_decay")
  columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(key)) for key in keys]
  return [
    wr.ScatterPlot(title="Last eval loss against rho", x=wr.Config("opt.rho"), y=loss, log_x=True),
    wr.ParallelCoordinatesPlot(
      title="What was tried", columns=[*columns, wr.ParallelCoordinatesPlotColumn(loss)]
    ),
  ]


if __name__ == "__main__":
  errors.run(main)
