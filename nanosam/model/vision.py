"""A small vision Transformer: images to one hidden state each, by the blocks of the decoder.

Dimensions: B batch, S side of an image, P side of a patch, L patches (and the class token), D
width, V classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nanosam.model.sharding import gathered, split_over_batch
from nanosam.model.transformer import Linear, ModelConfig, apply_blocks, embed_init

POOLINGS = ("mean", "token")


class VisionTransformer(nn.Module):
  cfg: ModelConfig

  def example(self) -> jax.ShapeDtypeStruct:
    """One image."""
    S = self.cfg.image_size
    return jax.ShapeDtypeStruct((S, S, 3), jnp.uint8)

  def _head_init(self, *args: Any) -> jax.Array:
    return self.cfg.head_scale * embed_init(*args)

  @nn.compact
  def __call__(self, images_BxSxSx3: jax.Array, segments: None = None) -> jax.Array:
    """The last hidden state of each image, as a sequence of one."""
    cfg = self.cfg
    self.param("unembed", self._head_init, (cfg.V, cfg.D))  # used by the head alone
    x_BxLxD = Linear(cfg.D, cfg.dtype, name="patch_embed")(patches(images_BxSxSx3, cfg.patch_size))
    x_BxLxD = x_BxLxD.astype(cfg.wide)
    if cfg.pooling == "token":
      token_1xD = gathered(self.param("class_token", embed_init, (1, cfg.D)), cfg.dtype)
      first_Bx1xD = jnp.broadcast_to(token_1xD.astype(cfg.wide), (len(x_BxLxD), 1, cfg.D))
      x_BxLxD = jnp.concatenate([first_Bx1xD, x_BxLxD], axis=1)
    pos_LxD = self.param("pos_embed", embed_init, x_BxLxD.shape[1:])
    x_BxLxD += gathered(pos_LxD, cfg.dtype)[None].astype(cfg.wide)
    x_BxLxD = apply_blocks(cfg, split_over_batch(x_BxLxD))
    return x_BxLxD[:, :1] if cfg.pooling == "token" else jnp.mean(x_BxLxD, 1, keepdims=True)


def patches(images_BxSxSx3: jax.Array, P: int) -> jax.Array:
  """Squares of P x P pixels, row by row, with values from -1 to 1."""
  B, S = images_BxSxSx3.shape[:2]
  n = S // P
  x = images_BxSxSx3.reshape(B, n, P, n, P, 3)
  x_BxLxP = jnp.swapaxes(x, 2, 3).reshape(B, n * n, P * P * 3)
  return x_BxLxP.astype(jnp.float32) / 127.5 - 1
