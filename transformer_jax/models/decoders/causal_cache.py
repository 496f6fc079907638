"""The cache of a causal decoder: keys and values, and the tokens themselves."""

from typing import Self

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.models.decoder_cache import DecoderCache


class CausalCache(DecoderCache):
    """A decoder's cache with its tokens, for embeddings that read the previous token.

    Attributes:
      tokens: (B W, T) tokens of each beam, valid before `length`.
      memory: For each layer, keys and values of an encoder's states in B rows, one copy for all beams; None for
        a decoder without cross-attention.
    """

    tokens: jax.Array
    memory: tuple[KeyValueCache, ...] | None = None

    def repeat(self, times: int) -> Self:
        """Repeat each beam `times` times; see `Cache`."""
        return super().repeat(times).replace(tokens=jnp.repeat(self.tokens, times, axis=0))

    def reorder(self, rows: jax.Array) -> Self:
        """Reorder the beams; see `Cache`."""
        return super().reorder(rows).replace(tokens=self.tokens[rows])

    def with_tokens(self, new: jax.Array, at: jax.Array) -> tuple[Self, jax.Array]:
        """Write the new tokens (B W, N) from position `at` on.

        Returns:
          (the cache, the token before the new ones (B W, 1); it is meaningless at position 0).
        """
        previous = jax.lax.dynamic_slice_in_dim(self.tokens, jnp.maximum(at - 1, 0), 1, axis=1)
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, new.astype(jnp.int32), at, axis=1)
        return self.replace(tokens=tokens), previous
