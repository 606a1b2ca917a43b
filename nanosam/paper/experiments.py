"""The tables and figures of arXiv 2502.02407 as data: methods, settings, stages.

Two experiments are ours: `outputs` varies the number of classes, `vision` compares methods there.
"""

from typing import Any, NamedTuple

from nanosam.study.comparison import ADAMW

TRAINED = ("baseline", "rho", "seeds", "compute", "factors")
STAGES = (*TRAINED, "tau")  # see protocol.py
MEASURES = ("sharpness", "prune")  # of final models
# Where to look for rho at the paper's sizes. The paper's best SAM has rho 0.1, the smallest it
# tried: start below. Preconditioned directions spread over all coordinates rather than the few with
# large gradients, and tolerate more.
PAPER_RHO = {
  **dict.fromkeys(("sam", "func_sam", "momentum_func_sam"), (0.01, 0.03, 0.1, 0.3)),
  **dict.fromkeys(("precond_sam", "precond_func_sam"), (0.1, 0.3, 1.0, 3.0)),
}


VIT = "vit.py"


class Setting(NamedTuple):
  """A row of a table, except for the method."""

  label: str
  config: str  # file in configs/
  arguments: dict[str, Any]  # of the config
  paper: str = ""  # the paper's setting that it corresponds to

  @property
  def vision(self) -> bool:
    return self.config == VIT


class Experiment(NamedTuple):
  methods: tuple[str, ...]
  settings: dict[str, list[Setting]]  # by scale
  stages: tuple[str, ...] = ("baseline", "rho", "seeds")
  measures: tuple[str, ...] = ()


def _paper(config: str, *sizes: str) -> list[Setting]:
  return [Setting(size, config, {"size": size}, paper=size) for size in sizes]


def _mini(*widths: int, paper: str = "", **arguments: Any) -> list[Setting]:
  return [Setting(f"width {w}", "mini.py", {"width": w, **arguments}, paper=paper) for w in widths]


def _activations(config: str, **arguments: Any) -> list[Setting]:
  return [Setting(a, config, {**arguments, "activation": a}, paper=a) for a in ("gelu", "relu")]


LANGUAGE = Setting("language", "mini.py", {"width": 32})
VISION = Setting("vision", VIT, {})


def _outputs() -> list[Setting]:
  """The settings of Figure 2 with other numbers of outputs."""
  pieces = [{"width": 32, "vocab_size": n} for n in (64, 256, 1024, 4096)]
  return [Setting(f"{a['vocab_size']} pieces", "mini.py", a) for a in pieces] + [
    Setting(f"{n} classes", VIT, {"classes": n}) for n in (2, 10)
  ]


SIZES = ("23.9M", "42.5M", "117.9M", "1208M")
THREE = (ADAMW, "sam", "precond_func_sam")
FOUR = (ADAMW, "sam", "precond_sam", "precond_func_sam")
SIX = (*FOUR, "func_sam", "momentum_func_sam")
SMALL = {"mini": _mini(32), "paper": _paper("fixed_length.py", "23.9M")}
TAUS = Experiment(
  (ADAMW,),
  {"mini": [LANGUAGE, VISION], "paper": _paper("fixed_length.py", "2M", "23.9M")},
  ("tau",),
)
EXPERIMENTS = {
  "table1": Experiment(
    SIX, {"mini": _mini(32, paper="2M"), "paper": _paper("fixed_length.py", "2M")}, TRAINED
  ),
  "table2": Experiment(FOUR, {"mini": _mini(32, 64), "paper": _paper("fixed_length.py", *SIZES)}),
  "table3": Experiment(
    FOUR,
    {"mini": _mini(32, 64, tokens_per_parameter=20.0), "paper": _paper("chinchilla.py", *SIZES)},
  ),
  "table4": Experiment(
    FOUR,
    {"mini": _mini(32, paper="23.9M"), "paper": _paper("chinchilla.py", "23.9M")},
    measures=("sharpness",),
  ),
  "table5": Experiment(
    (ADAMW, "precond_sam", "precond_func_sam"),
    {
      "mini": _activations("mini.py", width=32),
      "paper": _activations("fixed_length.py", size="2M"),
    },
  ),
  "table6": Experiment(
    FOUR,
    {"mini": _mini(64, paper="117.9M"), "paper": _paper("chinchilla.py", "117.9M")},
    measures=("sharpness",),
  ),
  "fig1": Experiment((ADAMW, "sam"), SMALL),
  "fig2": TAUS,
  "fig3": Experiment(THREE, SMALL, ("baseline", "rho")),
  "fig4": TAUS,  # it adds tau_cross to Figure 2; ours draws all three in both
  "fig5": Experiment(THREE, SMALL, measures=("prune",)),
  "outputs": Experiment((ADAMW,), {"mini": _outputs()}, ("tau",)),
  "vision": Experiment((ADAMW, "sam", "func_sam", "logit_sam"), {"mini": [VISION]}),
}
