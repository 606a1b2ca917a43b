"""A method of your own: perturb along the sign of the gradient, on the functional path.

python -m nanosam.train --config=configs/quickstart.py --config.workdir=runs/sign \
  --config.opt.method=launch/methods/sign.py:sign_func_sam --config.opt.rho=0.05

A direction is a function of the gradient, the parameters, Adam's moments and the opt section of the
config. It returns a vector over all parameters and what counts as its length: the perturbation is
rho * vector / length. `Direction` also says what it needs (nanosam/optim/direction.py); paths are
`full`, `functional` and `logit` (nanosam/optim/methods.py).
"""

import jax
import jax.numpy as jnp
import optax

from nanosam.optim.direction import Direction, Ray
from nanosam.optim.methods import Method, functional


def along_sign(g, params, moments, opt):
  vector = jax.tree.map(jnp.sign, g)
  return Ray(vector, optax.tree.norm(vector))


sign_func_sam = Method(Direction(along_sign), functional)
