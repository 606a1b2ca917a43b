"""A W&B dashboard of a project's runs; needs wandb-workspaces: pip install -e '.[report]'."""

from typing import Any

from nanosam.optim.methods import METHODS
from nanosam.study import figures
from nanosam.study.runs import AXES, Axis
from nanosam.system.errors import UserError

# Metrics by section; each list of metrics is a panel.
LINES = {
  "Curvature: taus": {
    "Along the gradient": [f"tau/{kind}" for kind in figures.TAU_STYLES],
    "Along the preconditioned gradient": [f"tau_precond/{kind}" for kind in figures.TAU_STYLES],
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
  from wandb_workspaces.reports import v2 as wr

  def lines(title: str, y: list[str], axis: Axis = AXES["steps"]) -> Any:
    return wr.LinePlot(
      title=title,
      x=axis.key,
      y=[*y],
      title_x=axis.label,
      groupby_aggfunc="mean",
      groupby_rangefunc="minmax",
      max_runs_to_show=50,
    )

  evals = [lines(f"Eval loss against {a.label}", ["eval/loss"], a) for a in AXES.values()]
  rho, loss = wr.Config("opt.rho"), wr.SummaryMetric("last_eval_loss")
  keys = ("opt.method", "opt.rho", "opt.peak_learning_rate", "opt.weight_decay")
  columns: list[Any] = [*map(wr.Config, keys), loss]
  tried: list[Any] = [
    wr.ScatterPlot(title="Last eval loss against rho", x=rho, y=loss, log_x=True),
    wr.ParallelCoordinatesPlot(
      title="What was tried", columns=[*map(wr.ParallelCoordinatesPlotColumn, columns)]
    ),
  ]
  bits = lines("Bits per byte", ["eval/bits_per_byte"])
  return ws.Workspace(
    entity=entity,
    project=project,
    name="NanoSAM",
    sections=[
      ws.Section("Eval loss by method", panels=[*evals, bits], is_open=True),
      ws.Section("Loss against rho", panels=tried, is_open=True),
      *(
        ws.Section(name, panels=[lines(title, y) for title, y in panels.items()])
        for name, panels in LINES.items()
      ),
    ],
    settings=ws.WorkspaceSettings(x_axis="step", max_runs=50),
    runset_settings=ws.RunsetSettings(
      groupby=[expr.Config("opt.method"), expr.Config("opt.rho")],
      order=[expr.Ordering(expr.Summary("last_eval_loss"), ascending=True)],
      group_colors={method: style[0] for method, style in figures.styles_of(METHODS).items()},
      pinned_columns=["summary:last_eval_loss", "summary:best_eval_loss", "config:seed.value"],
    ),
  )
