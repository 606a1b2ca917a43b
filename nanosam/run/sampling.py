"""Text from a trained model, token by token."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nanosam.data.batch import Batch
from nanosam.data.sources import text_of
from nanosam.model import sharding
from nanosam.model.transformer import Params, unembedding
from nanosam.run.restore import Loaded
from nanosam.system.errors import need


class Sampler:
  """Extends token sequences until they end, or reach a length.

  Each token costs one forward pass over L positions: there is no cache of keys and values, and one
  compiled function does it all. Only the last L tokens are seen, since positions are learned.
  """

  def __init__(self, run: Loaded, *, temperature: float, top_k: int):
    self.tokenizer = text_of(run.source, run.config.data.source).tokenizer
    V = self.tokenizer.vocab_size
    need(0 <= temperature < math.inf, f"temperature={temperature} must be at least 0, and finite")
    need(0 <= top_k <= V, f"top_k={top_k} must be between 0 and the vocabulary's {V} tokens")
    self._run, self._L = run, run.config.model.L
    self._next = jax.jit(self._next_tokens, out_shardings=sharding.replicated(run.mesh))
    self._temperature, self._top_k = temperature, top_k or V

  def __call__(self, prompt: Sequence[int], *, num: int, length: int, seed: int) -> list[list[int]]:
    """`num` continuations of `prompt`, which they include; text i does not depend on `num`."""
    need(num >= 1 and length >= 1, f"num={num} and length={length} must be at least 1")
    need(0 <= seed < 2**32, f"seed={seed} must be between 0 and 2**32")
    eos = self.tokenizer.eos_id
    rows = -(-num // sharding.shards(self._run.mesh)) * sharding.shards(self._run.mesh)
    ids_NxT = np.tile(np.asarray(prompt, np.int32), (rows, 1))
    ended_N = np.zeros(rows, bool)
    key = jax.random.key(seed)
    with jax.set_mesh(self._run.mesh):
      for _ in range(length):
        window_NxT = ids_NxT[:, -self._L :]
        last = window_NxT.shape[1] - 1
        window_NxL = np.pad(window_NxT, ((0, 0), (0, self._L - 1 - last)))
        tokens_NxL = sharding.to_devices(window_NxL, self._run.mesh)
        place = jnp.uint32(ids_NxT.shape[1])
        new_N = jax.device_get(self._next(self._run.params, tokens_NxL, last, key, place))
        ids_NxT = np.concatenate([ids_NxT, np.where(ended_N, eos, new_N)[:, None]], 1)
        ended_N |= new_N == eos
        if ended_N[:num].all():
          break
    found = ids_NxT[:num].tolist()
    return [ids[: [*ids, eos].index(eos, len(prompt))] for ids in found]  # up to the end, if any

  def _next_tokens(
    self, params: Params, tokens_NxL: jax.Array, last: int, key: jax.Array, place: jax.Array
  ) -> jax.Array:
    h_NxLxD = self._run.model.hidden(params, Batch(tokens_NxL, None, None, None))
    h_NxD = jax.lax.dynamic_index_in_dim(h_NxLxD, last, axis=1, keepdims=False)
    W_VxD = sharding.gathered(unembedding(params), h_NxD.dtype)
    logits_NxV = jnp.einsum("nd,vd->nv", h_NxD, W_VxD, preferred_element_type=jnp.float32)
    best_NxK, ids_NxK = jax.lax.top_k(logits_NxV, self._top_k)  # likeliest first
    if self._temperature == 0:
      return ids_NxK[:, 0]
    rows_N = jnp.arange(len(tokens_NxL), dtype=jnp.uint32)
    keys_N = jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, n), place))(rows_N)
    choice_N = jax.vmap(jax.random.categorical)(keys_N, best_NxK / self._temperature)
    return jnp.take_along_axis(ids_NxK, choice_N[:, None], axis=1)[:, 0]
