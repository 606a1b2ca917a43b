"""Decoder-only Transformer: tokens to last hidden states. Its blocks are those of vision.py too.

The unembedding is not part of it: `head.py` turns hidden states into a loss and its gradient
without ever holding all logits. Dimensions: B batch, L length, D width, H heads, N layers, F inner
width of the MLP, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from nanosam.model.sharding import STACKED, gathered, rows_of, split_over_batch

Params = Any

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "gelu": jax.nn.gelu,
  "relu": jax.nn.relu,
}
HEADS_AT_A_TIME = 8  # of plain attention with rematerialisation
ATTENTIONS = ("auto", "plain", "xla", "cudnn")  # auto: see nanosam/run/attention.py

kernel_init = nn.initializers.xavier_uniform()
embed_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  D: int
  H: int
  L: int
  N: int
  F: int
  V: int
  activation: str
  tied: bool
  dtype: Any
  remat: bool
  scan_layers: bool
  attention: str
  kind: str
  image_size: int
  patch_size: int
  pooling: str
  head_scale: float

  @property
  def causal(self) -> bool:
    """Whether no position sees a later one."""
    return self.kind == "decoder"

  @property
  def wide(self) -> Any:
    """The type of softmax and of the residual stream: at least fp32, as in the reference."""
    return jnp.promote_types(self.dtype, jnp.float32)


class Linear(nn.Module):
  """x[..., in] @ kernel[in, out], no bias."""

  features: int
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.param("kernel", kernel_init, (x.shape[-1], self.features))
    return x.astype(self.dtype) @ gathered(kernel, self.dtype)


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments_BxL: jax.Array | None,
  cfg: ModelConfig,
) -> jax.Array:
  """Of B x L x H x K arrays. Causal in a decoder; no token sees another segment's."""
  L = q.shape[1]
  mask = jnp.tril(jnp.ones((1, 1, L, L), bool)) if cfg.causal else jnp.ones((1, 1, 1, 1), bool)
  if segments_BxL is not None:
    mask &= segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :]
  if cfg.attention != "plain":
    return jax.nn.dot_product_attention(
      q,
      k,
      v,
      mask=None if segments_BxL is None else mask,
      is_causal=cfg.causal and segments_BxL is None,
      implementation=cast(Literal["xla", "cudnn"], cfg.attention),
    )
  if cfg.remat:
    return _few_heads_at_a_time(functools.partial(_attend, mask=mask, cfg=cfg), q, k, v)
  return _attend(q, k, v, mask=mask, cfg=cfg)


def _attend(
  q_BxLxHxK: jax.Array,
  k_BxLxHxK: jax.Array,
  v_BxLxHxK: jax.Array,
  *,
  mask: jax.Array,
  cfg: ModelConfig,
) -> jax.Array:
  q_BxLxHxK = q_BxLxHxK / q_BxLxHxK.shape[-1] ** 0.5
  att_BxHxLxL = jnp.einsum("bqhk,bthk->bhqt", q_BxLxHxK, k_BxLxHxK).astype(cfg.wide)
  att_BxHxLxL = jnp.where(mask, att_BxHxLxL, jnp.finfo(cfg.wide).min)
  att_BxHxLxL = jax.nn.softmax(att_BxHxLxL, axis=-1).astype(cfg.dtype)
  return jnp.einsum("bhqt,bthk->bqhk", att_BxHxLxL, v_BxLxHxK)


def _few_heads_at_a_time(attend: Callable[..., jax.Array], *qkv_BxLxHxK: jax.Array) -> jax.Array:
  """On the way back, only the attention weights of these heads exist at one time."""
  B, L, H, K = qkv_BxLxHxK[0].shape
  heads = max(h for h in range(1, HEADS_AT_A_TIME + 1) if H % h == 0)

  def split(x_BxLxHxK: jax.Array) -> jax.Array:
    return split_over_batch(jnp.moveaxis(x_BxLxHxK.reshape(B, L, -1, heads, K), 2, 0), axis=1)

  def one(qkv: list[jax.Array]) -> jax.Array:
    return jax.checkpoint(attend)(*qkv)

  out_NxBxLxhxK = jax.lax.map(one, [split(x) for x in qkv_BxLxHxK])
  return jnp.moveaxis(out_NxBxLxhxK, 0, 2).reshape(B, L, H, K)


class Attention(nn.Module):
  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array, segments_BxL: jax.Array | None) -> jax.Array:
    cfg = self.cfg
    B, L, D = x_BxLxD.shape
    q, k, v = (
      Linear(D, cfg.dtype, name=name)(x_BxLxD).reshape(B, L, cfg.H, D // cfg.H)
      for name in ("query", "key", "value")
    )
    out_BxLxD = attend(q, k, v, segments_BxL, cfg).reshape(B, L, D)
    return Linear(D, cfg.dtype, name="out")(out_BxLxD)


class Mlp(nn.Module):
  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    x_BxLxF = Linear(self.cfg.F, self.cfg.dtype, name="up")(x_BxLxD)
    x_BxLxF = ACTIVATIONS[self.cfg.activation](x_BxLxF)
    return Linear(self.cfg.D, self.cfg.dtype, name="down")(x_BxLxF)


def norm(cfg: ModelConfig, name: str) -> nn.LayerNorm:
  return nn.LayerNorm(use_bias=False, dtype=cfg.dtype, name=name)


class Block(nn.Module):
  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array, segments_BxL: jax.Array | None) -> tuple[jax.Array, None]:
    x_BxLxD += Attention(self.cfg, name="attention")(norm(self.cfg, "norm1")(x_BxLxD), segments_BxL)
    x_BxLxD += Mlp(self.cfg, name="mlp")(norm(self.cfg, "norm2")(x_BxLxD))
    return split_over_batch(x_BxLxD), None  # (carry, no output): the form that scan wants


class Transformer(nn.Module):
  cfg: ModelConfig

  def example(self) -> jax.ShapeDtypeStruct:
    """One row of inputs."""
    return jax.ShapeDtypeStruct((self.cfg.L,), jnp.int32)

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None) -> jax.Array:
    cfg = self.cfg
    embed_VxD = self.param("embed", embed_init, (cfg.V, cfg.D))
    pos_LxD = self.param("pos_embed", embed_init, (cfg.L, cfg.D))
    if not cfg.tied:
      self.param("unembed", embed_init, (cfg.V, cfg.D))  # used by the head alone

    L = tokens_BxL.shape[1]
    x_BxLxD = rows_of(embed_VxD.astype(cfg.dtype), tokens_BxL, cfg.wide)
    x_BxLxD += gathered(pos_LxD, cfg.dtype)[None, :L].astype(cfg.wide)
    return apply_blocks(cfg, split_over_batch(x_BxLxD), segments_BxL)


def apply_blocks(
  cfg: ModelConfig, x_BxLxD: jax.Array, segments_BxL: jax.Array | None = None
) -> jax.Array:
  """All layers and the last norm; their parameters become those of the module that calls."""
  # Inside a scan the loop already keeps XLA from merging the recomputation away.
  block = nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
  if cfg.scan_layers:
    stack = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=nn.broadcast,
      length=cfg.N,
    )
    x_BxLxD, _ = stack(cfg, name=STACKED)(x_BxLxD, segments_BxL)
  else:
    for i in range(cfg.N):
      x_BxLxD, _ = block(cfg, name=f"layer_{i}")(x_BxLxD, segments_BxL)
  return norm(cfg, "out_norm")(x_BxLxD)


def unembedding(params: Params) -> jax.Array:
  """The matrix V x D that the head multiplies by: the embedding itself unless untied."""
  return params["unembed"] if "unembed" in params else params["embed"]


def non_embedding_count(params: Params) -> int:
  """Parameters in the layers' matrices: how the reference names its sizes."""
  return sum(
    x.size for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"
  )
