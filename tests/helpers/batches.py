"""Random batches."""

import jax
import jax.numpy as jnp

from nanosam.data.batch import Batch


def random_batch(seed: int, B: int, L: int, V: int, padded: bool = True) -> Batch:
  """Rows of unequal token counts, as padding makes them."""
  key_x, key_y, key_w = jax.random.split(jax.random.key(seed), 3)
  lengths_Bx1 = jax.random.randint(key_w, (B, 1), 1, L + 1)
  full_BxL = jnp.ones((B, L), jnp.float32)
  weights_BxL = (jnp.arange(L)[None, :] < lengths_Bx1).astype(jnp.float32)
  return Batch(
    jax.random.randint(key_x, (B, L), 0, V, jnp.int32),
    jax.random.randint(key_y, (B, L), 0, V, jnp.int32),
    weights_BxL if padded else full_BxL,
    None,
  )


def random_images(seed: int, B: int, S: int, V: int) -> Batch:
  """Images of S x S pixels with classes; every third row is padding."""
  key_x, key_y = jax.random.split(jax.random.key(seed))
  return Batch(
    jax.random.randint(key_x, (B, S, S, 3), 0, 256).astype(jnp.uint8),
    jax.random.randint(key_y, (B, 1), 0, V, jnp.int32),
    (jnp.arange(B) % 3 < 2).astype(jnp.float32)[:, None],
  )
