"""The cache of an attention decoder; beams are reordered by changing a mask."""

from typing import Self

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.cache import KeyValueCache


class DecoderCache(flax.struct.PyTreeNode):
    """The state of an attention decoder between two steps, for B sentences with W beams each.

    Attributes:
      target: For each layer, keys and values of the tokens so far: B rows with W entries per position.
      length: Number of positions filled so far.
      history: (B, W, T), the index of each beam's entry among the W entries of a position.
      first: (B,) position of each sentence's first token. Prompts of unequal length end at the same position,
        so that one step writes the next token of every row. None if all sentences start at position 0.
    """

    target: tuple[KeyValueCache, ...]
    length: jax.Array
    history: jax.Array
    first: jax.Array | None

    @classmethod
    def empty(
        cls, layers: int, rows: int, length: int, kv_heads: int, head_width: int, dtype: jnp.dtype, **fields
    ) -> Self:
        """Create an empty cache for `length` tokens of each row; `fields` are the fields of a subclass."""
        layer = KeyValueCache.empty(rows, length, kv_heads, head_width, dtype)
        return cls(
            target=(layer,) * layers,
            length=jnp.zeros((), jnp.int32),
            history=jnp.zeros((rows, 1, length), jnp.int32),
            **fields,
        )

    def repeat(self, times: int) -> Self:
        """Repeat each beam `times` times; see `Cache`."""
        return self.replace(
            target=jax.tree.map(lambda x: jnp.repeat(x, times, axis=3), self.target),
            history=jnp.repeat(self.history * times, times, axis=1),
        )

    def reorder(self, rows: jax.Array) -> Self:
        """Reorder the beams; see `Cache`."""
        # Moving the keys instead would read and write the entire cache in every step.
        B, W, T = self.history.shape
        return self.replace(history=self.history.reshape(B * W, T)[rows].reshape(B, W, T))

    def truncate(self, length: jax.Array) -> Self:
        """Return the cache as it was when `length` positions were filled; later steps overwrite the rest."""
        return self.replace(length=length)

    def positions(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Compute the positions of tokens within their sentences.

        Returns:
          (positions of the next `count` tokens, (N,) or (B, N); positions of all entries, (T W,) or (B, T W)).
        """
        _, W, T = self.history.shape
        new, entries = self.length + jnp.arange(count), jnp.arange(T * W) // W
        if self.first is None:
            return new, entries
        # Entries before a sentence's first token are masked; 0 keeps them in the range of a position table.
        new, entries = new - self.first[:, None], entries - self.first[:, None]
        return jnp.maximum(new, 0), jnp.maximum(entries, 0)

    def extended(self, count: int) -> tuple[Self, jax.Array]:
        """Extend every beam by `count` tokens, except for their keys and values.

        Returns:
          (the cache, the mask (B, 1, W N, T W) of the entries that each new token sees).
        """
        B, W, T = self.history.shape
        positions, beams = jnp.arange(T), jnp.arange(W)
        history = jnp.where(positions < self.length, self.history, beams[:, None])
        in_history = history[..., None] == beams  # (B, W, T, W)
        visible = (positions <= self.length + jnp.arange(count)[:, None])[None]  # (1, N, T)
        if self.first is not None:
            visible = visible & (positions >= self.first[:, None, None])
        mask = in_history[:, :, None] & visible[:, None, :, :, None]  # (B, W, N, T, W)
        return self.replace(history=history, length=self.length + count), mask.reshape(B, 1, W * count, T * W)
