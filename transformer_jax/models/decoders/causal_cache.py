"""What a causal decoder keeps between two steps: a decoder's cache, and the tokens themselves."""

from typing import Self

import jax
import jax.numpy as jnp

from transformer_jax.models.decoder_cache import DecoderCache


class CausalCache(DecoderCache):
    """A decoder's cache with its tokens, for embeddings that look at the token before.

    Attributes:
      tokens: (B W, T) of each beam, right in front of `length`.
    """

    tokens: jax.Array

    def repeat(self, times: int) -> Self:
        return super().repeat(times).replace(tokens=jnp.repeat(self.tokens, times, axis=0))

    def reorder(self, rows: jax.Array) -> Self:
        return super().reorder(rows).replace(tokens=self.tokens[rows])

    def with_tokens(self, new: jax.Array, at: jax.Array) -> tuple[Self, jax.Array]:
        """The cache with the new tokens (B W, N) from place `at` on, and the token in front (B W, 1).

        In front of place 0 there is none; what comes back is then not to be read.
        """
        before = jax.lax.dynamic_slice_in_dim(self.tokens, jnp.maximum(at - 1, 0), 1, axis=1)
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, new.astype(jnp.int32), at, axis=1)
        return self.replace(tokens=tokens), before
