"""What a decoder keeps between two steps; beams change places by a mask."""

from typing import Self

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.cache import KeyValueCache


class DecoderCache(flax.struct.PyTreeNode):
    """A decoder between two steps, of B sentences with W beams each.

    Attributes:
      target: per layer, keys and values of the tokens so far: B rows, W entries a place.
      length: number of places filled so far.
      history: (B, W, T) which of a place's W entries belongs to each beam.
      first: (B,) the place of each sentence's first token: prompts of unequal length end at the same
        place, so that one step writes the next token of all. None where all begin at place 0.
    """

    target: tuple[KeyValueCache, ...]
    length: jax.Array
    history: jax.Array
    first: jax.Array | None

    @classmethod
    def room(
        cls, layers: int, rows: int, length: int, kv_heads: int, head_width: int, dtype: jnp.dtype, **others
    ) -> Self:
        """An empty cache for `length` tokens of each of the rows; `others` are a subclass's fields."""
        empty = KeyValueCache.empty(rows, length, kv_heads, head_width, dtype)
        return cls(
            target=(empty,) * layers,
            length=jnp.zeros((), jnp.int32),
            history=jnp.zeros((rows, 1, length), jnp.int32),
            **others,
        )

    def repeat(self, times: int) -> Self:
        return self.replace(
            target=jax.tree.map(lambda x: jnp.repeat(x, times, axis=3), self.target),
            history=jnp.repeat(self.history * times, times, axis=1),
        )

    def reorder(self, rows: jax.Array) -> Self:
        # Moving the keys themselves would read and write the whole cache in every step.
        B, W, T = self.history.shape
        return self.replace(history=self.history.reshape(B * W, T)[rows].reshape(B, W, T))

    def cut(self, length: jax.Array) -> Self:
        """The cache as it was when `length` places were filled; what lies behind is written over."""
        return self.replace(length=length)

    def positions(self, new: int) -> tuple[jax.Array, jax.Array]:
        """Positions in their sentence of `new` tokens to come, (N,) or (B, N), and of all entries, (T W,)
        or (B, T W)."""
        _, W, T = self.history.shape
        coming, entries = self.length + jnp.arange(new), jnp.arange(T * W) // W
        if self.first is None:
            return coming, entries
        # AttentionContext before a sentence's first token are masked; 0 keeps a table's index in range.
        coming, entries = coming - self.first[:, None], entries - self.first[:, None]
        return jnp.maximum(coming, 0), jnp.maximum(entries, 0)

    def extended(self, new: int) -> tuple[Self, jax.Array]:
        """The cache once every beam has `new` more tokens of its own, but for their keys and values.

        Returns:
          (the cache, the mask (B, 1, W N, T W) of what each new token sees).
        """
        B, W, T = self.history.shape
        places, beams = jnp.arange(T), jnp.arange(W)
        history = jnp.where(places < self.length, self.history, beams[:, None])
        own = history[..., None] == beams  # (B, W, T, W)
        seen = (places <= self.length + jnp.arange(new)[:, None])[None]  # (1, N, T)
        if self.first is not None:
            seen = seen & (places >= self.first[:, None, None])
        mask = own[:, :, None] & seen[:, None, :, :, None]  # (B, W, N, T, W)
        return self.replace(history=history, length=self.length + new), mask.reshape(B, 1, W * new, T * W)
