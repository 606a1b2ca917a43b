"""A W&B dashboard of a project's runs; needs wandb-workspaces: pip install -e '.[report]'."""

from typing import Any

from nanosam.optim.methods import METHODS
from nanosam.study import figures
from nanosam.study.runs import AXES
from nanosam.system.errors import UserError

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


def workspace(entity: str, project: str) -> Any:
  """Runs are grouped by method and rho: a line is a mean over seeds, its band their range."""
  try:
    import wandb_workspaces.workspaces as ws
  except ImportError:
    raise UserError("the dashboard needs wandb-workspaces: pip install -e '.[report]'") from None
  from wandb_workspaces import expr

  sections = [
    ws.Section("Eval loss by method", panels=_eval_panels(), is_open=True),
    ws.Section("Loss against rho", panels=_rho_panels(), is_open=True),
  ]
  for name, panels in LINES.items():
    sections.append(ws.Section(name, panels=[_lines(title, y) for title, y in panels.items()]))
  return ws.Workspace(
    entity=entity,
    project=project,
    name="NanoSAM",
    sections=sections,
    settings=ws.WorkspaceSettings(x_axis="step", max_runs=50),
    runset_settings=ws.RunsetSettings(
      groupby=[expr.Config("opt.method"), expr.Config("opt.rho")],
      order=[expr.Ordering(expr.Summary("last_eval_loss"), ascending=True)],
      group_colors={method: figures.STYLES.get(method, figures.OTHER)[0] for method in METHODS},
      pinned_columns=["summary:last_eval_loss", "summary:best_eval_loss", "config:seed.value"],
    ),
  )


def _lines(title: str, y: list[str], axis: str = "steps") -> Any:
  import wandb_workspaces.reports.v2 as wr

  return wr.LinePlot(
    title=title,
    x=AXES[axis].key,
    y=[*y],
    title_x=AXES[axis].label,
    groupby_aggfunc="mean",
    groupby_rangefunc="minmax",
    max_runs_to_show=50,
  )


def _eval_panels() -> list[Any]:
  titles = {name: f"Eval loss against {axis.label}" for name, axis in AXES.items()}
  panels = [_lines(title, ["eval/loss"], name) for name, title in titles.items()]
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
