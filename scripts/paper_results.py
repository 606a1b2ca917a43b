"""Eval losses reported in arXiv 2502.02407, by table, setting and method; None: it diverged."""

TABLES: dict[str, dict[str, dict[str, float | None]]] = {
  "table1": {
    "2M": {
      "adamw": 3.90,
      "sam": 3.91,
      "precond_sam": 3.89,
      "func_sam": 3.88,
      "precond_func_sam": 3.86,
    }
  },
  "table2": {
    "23.9M": {"adamw": 3.57, "sam": 3.59, "precond_sam": 3.55, "precond_func_sam": 3.53},
    "42.5M": {"adamw": 3.45, "sam": 3.46, "precond_sam": 3.44, "precond_func_sam": 3.41},
    "117.9M": {"adamw": 3.28, "sam": 3.29, "precond_sam": 3.27, "precond_func_sam": 3.25},
    # 3.08 (sam) and 3.07 (precond_sam) with a warmup of rho, which is how our configs run them.
    "1208M": {"adamw": 3.08, "sam": None, "precond_sam": None, "precond_func_sam": 3.05},
  },
  "table3": {
    "23.9M": {"adamw": 3.69, "sam": 3.71, "precond_sam": 3.66, "precond_func_sam": 3.63},
    "42.5M": {"adamw": 3.45, "sam": 3.46, "precond_sam": 3.43, "precond_func_sam": 3.41},
    "117.9M": {"adamw": 3.12, "sam": 3.13, "precond_sam": 3.11, "precond_func_sam": 3.10},
    "1208M": {"adamw": 2.63, "sam": None, "precond_sam": None, "precond_func_sam": 2.61},
  },
  "table5": {
    "gelu": {"adamw": 3.9069, "precond_sam": 3.8894, "precond_func_sam": 3.8614},
    "relu": {"adamw": 3.9145, "precond_sam": 3.8937, "precond_func_sam": 3.8777},
  },
}
# Figures have curves, not numbers: what they show.
FIGURES = {
  "fig1": "the paper: SAM's eval loss is above AdamW's throughout training",
  "fig3": "the paper (23.9M, fixed length): SAM gets worse with every non-zero rho, PrecondFuncSAM "
  "improves, and its best rho is much larger",
}
