"""Which features the linear attention model learns when, by method and by choice of data.

The source ("Data Distribution as a Lever for Guiding Optimizers Toward Superior Generalization in
LLMs", its Figure 1 and Theorem 4.4) gives none of its settings. Those here follow arXiv 2501.16265.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanosam.model import linear_attention as model
from nanosam.model.linear_attention import Moments, Params, Sequences
from nanosam.paper.simplicity import upsampling
from nanosam.paper.simplicity.training import EVERY, Gradient, gradient, per_head_sam, train

TASK = model.Task(spectrum=(0.4, 0.3, 0.2, 0.1), N=31)


@dataclasses.dataclass(frozen=True)
class Settings:
  heads: int = 16
  sigma: float = 0.05  # of the parameters at the start
  sequences: int = 5000  # one data set for each seed, and all of it in each step
  step_size: float = 0.2
  steps: int = 6000
  proxy_steps: int = 1500  # past most drops
  seeds: int = 100
  first_seed: int = 20_000


class Arm(NamedTuple):
  name: str
  method: str = "sam"  # of the library; at rho 0 it is gradient descent
  rho: float = 0.0  # in units of sigma
  step: float = 1.0  # in units of the step size
  upsampled: str = ""  # which sequences count twice
  per_head: bool = False

  def gradient(self, sigma: float) -> Gradient:
    rho = self.rho * sigma
    return per_head_sam(rho) if self.per_head else gradient(self.method, rho)

  def steps_for(self, gradients: int, proxy_steps: int) -> int:
    """That this many gradients pay for: SAM takes two a step, and a proxy is trained before."""
    left = gradients - (proxy_steps if self.upsampled else 0)
    return left // 2 if self.rho else left


BASELINE = "GD"
HARD = "hard, relative"
ARMS = (
  Arm(BASELINE),
  Arm("GD, step size x 1.3", step=1.3),
  *(Arm(f"SAM, rho {rho:g} sigma", rho=rho) for rho in (0.5, 1.0, 2.0, 3.0)),
  Arm("func_sam, rho 1 sigma", "func_sam", 1.0),
  Arm("logit_sam, rho 1 sigma", "logit_sam", 1.0),
  *(Arm(f"SAM per head, rho {rho:g} sigma", rho=rho, per_head=True) for rho in (0.5, 1.0)),
  *(Arm(f"upsample hard, {f}", upsampled=f"hard, {f}") for f in upsampling.FEATURES),
  Arm("upsample easy", upsampled="easy"),
  Arm("upsample random", upsampled="random"),
)


OTHER_ARMS = tuple(
  arm
  for arm in ARMS
  if arm.upsampled in ("", HARD) and not arm.per_head and arm.rho < 3 and arm.step == 1
)


def others(settings: Settings) -> list[Settings]:
  """With fewer heads, and from a smaller start: both have longer plateaus."""
  longer = {"steps": 5 * settings.steps, "proxy_steps": 5 * settings.proxy_steps}
  return [
    dataclasses.replace(settings, heads=5, **longer),
    dataclasses.replace(settings, sigma=settings.sigma / 5, **longer),
  ]


class Result(NamedTuple):
  """Of one arm, over seeds."""

  arm: Arm
  upsampled: float  # share of the sequences
  times_SxFxD: np.ndarray  # see training.Trained
  test_SxT: np.ndarray  # exact test loss, every EVERY steps


class Start(NamedTuple):
  """What all arms share, with seeds as the leading axis."""

  params: Params
  sequences: Sequences
  upsampled: dict[str, np.ndarray]  # bool [S, P]


def run(settings: Settings, arms: tuple[Arm, ...] = ARMS) -> Iterator[Result]:
  """Arm by arm; all seeds of one at once."""
  start = prepare(settings, any(arm.upsampled for arm in arms))
  for arm in arms:
    mask_SxP = start.upsampled.get(arm.upsampled, np.zeros(start.sequences.y_P.shape, bool))
    trained = fit(settings, arm, start.params, start.sequences, 1.0 + mask_SxP)
    test = jax.vmap(jax.vmap(lambda A_DxD: model.loss(A_DxD, TASK.moments)))
    test_SxT = np.asarray(jax.jit(test)(trained.A_TxDxD))
    yield Result(arm, mask_SxP.mean(), np.asarray(trained.times_FxD), test_SxT)


def prepare(settings: Settings, with_proxy: bool) -> Start:
  """Starts and data sets; and, for a proxy that starts elsewhere, what it finds hard."""
  numbers = jnp.arange(settings.first_seed, settings.first_seed + settings.seeds)
  keys_Sx3 = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(numbers)
  init = jax.vmap(lambda key: model.init(key, settings.heads, len(TASK.spectrum), settings.sigma))
  sample = jax.jit(functools.partial(TASK.sample, P=settings.sequences))
  sequences = jax.tree.map(lambda *x: jnp.stack(x), *map(sample, keys_Sx3[:, 0]))
  start = Start(init(keys_Sx3[:, 1]), sequences, {})
  if not with_proxy:
    return start
  proxy = dataclasses.replace(settings, steps=settings.proxy_steps)
  ones_SxP = np.ones(sequences.y_P.shape)
  trained = fit(proxy, ARMS[0], init(keys_Sx3[:, 2]), sequences, ones_SxP)
  at_K = np.array(upsampling.checkpoints(settings.proxy_steps)) // EVERY
  errors = jax.jit(jax.vmap(jax.vmap(model.squared_errors, (0, None))))
  loss_SxKxP = np.asarray(errors(trained.A_TxDxD[:, at_K], sequences))
  untrained_SxP = np.asarray(sequences.y_P) ** 2
  masks: dict[str, list[np.ndarray]] = {}
  for number, loss_KxP, untrained_P in zip(numbers, loss_SxKxP, untrained_SxP, strict=True):
    chosen = {
      f"hard, {f}": upsampling.hard(loss_KxP.T, untrained_P, f) for f in upsampling.FEATURES
    }
    chosen |= upsampling.controls(chosen[HARD], np.random.default_rng(int(number)))
    for name, mask_P in chosen.items():
      masks.setdefault(name, []).append(mask_P)
  return start._replace(upsampled={name: np.stack(mask) for name, mask in masks.items()})


def fit(
  settings: Settings, arm: Arm, params: Params, sequences: Sequences, weight_SxP: np.ndarray
) -> Any:
  """training.train on every seed."""
  moments = jax.jit(jax.vmap(model.moments))(sequences, jnp.asarray(weight_SxP))
  one: Callable[[Params, Moments], Any] = functools.partial(
    train,
    arm.gradient(settings.sigma),
    final_D=TASK.final_D,
    step_size=arm.step * settings.step_size,
    steps=settings.steps,
  )
  return jax.jit(jax.vmap(one))(params, moments)
