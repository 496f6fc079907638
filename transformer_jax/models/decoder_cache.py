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
      window: Number of keys that a token sees, its own included, if only as many positions are kept: position p
        is then in entry p modulo T. None keeps all positions.
    """

    target: tuple[KeyValueCache, ...]
    length: jax.Array
    history: jax.Array
    first: jax.Array | None
    window: int | None = flax.struct.field(pytree_node=False, kw_only=True, default=None)

    @classmethod
    def empty(
        cls,
        layers: int,
        rows: int,
        length: int,
        kv_heads: int,
        head_width: int,
        dtype: jnp.dtype,
        *,
        window: int | None = None,
        **fields,
    ) -> Self:
        """Create an empty cache for `length` tokens of each row; `fields` are the fields of a subclass."""
        if window is not None and window >= length:
            window = None
        length = length if window is None else window
        layer = KeyValueCache.empty(rows, length, kv_heads, head_width, dtype, rolls=window is not None)
        return cls(
            window=window,
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
        """Return the cache as it was when `length` positions were filled; later steps overwrite the rest.

        Raises:
          ValueError: The cache keeps a window only, of which later positions have overwritten a part.
        """
        if self.window is not None:
            raise ValueError(f"a cache of the last {self.window} positions cannot go back to fewer")
        return self.replace(length=length)

    def _entry_positions(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the positions (E,) of the entries that `count` new tokens see, and those (T,) kept afterwards.

        Positions of empty entries are negative, or not yet reached.
        """
        T = self.history.shape[2]
        if self.window is None:
            return jnp.arange(T), jnp.arange(T)

        def kept(last: jax.Array) -> jax.Array:
            return last - (last - jnp.arange(T)) % T

        after = kept(self.length + count - 1)
        if count == 1:
            return after, after
        # The new tokens follow the old entries, see `KeyValueCache.followed_by`.
        return jnp.concatenate([kept(self.length - 1), self.length + jnp.arange(count)]), after

    def positions(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Compute the positions of tokens within their sentences.

        Returns:
          (positions of the next `count` tokens, (N,) or (B, N); positions of the E W entries that they see,
          (E W,) or (B, E W)).
        """
        W = self.history.shape[1]
        new, entries = self.length + jnp.arange(count), jnp.repeat(self._entry_positions(count)[0], W)
        if self.first is None:
            return new, entries
        # Entries before a sentence's first token are masked; 0 keeps them in the range of a position table.
        new, entries = new - self.first[:, None], entries - self.first[:, None]
        return jnp.maximum(new, 0), jnp.maximum(entries, 0)

    def extended(self, count: int) -> tuple[Self, jax.Array]:
        """Extend every beam by `count` tokens, except for their keys and values.

        Returns:
          (the cache, the mask (B, 1, W N, E W) of the entries that each new token sees). All E = T entries are
          seen, and in a cache of a window also N > 1 new tokens after them.
        """
        B, W, T = self.history.shape
        beams = jnp.arange(W)
        positions, kept = self._entry_positions(count)
        history = jnp.where((kept >= 0) & (kept < self.length), self.history, beams[:, None])
        seen = history
        if len(positions) > T:
            new = jnp.broadcast_to(beams[:, None], (B, W, count))
            seen = jnp.concatenate([self.history, new], axis=2)
        in_history = seen[..., None] == beams  # (B, W, E, W)
        queries = self.length + jnp.arange(count)[:, None]
        visible = positions <= queries
        if self.window is not None:
            visible = visible & (positions > queries - self.window) & (positions >= 0)
        visible = visible[None]  # (1, N, E)
        if self.first is not None:
            visible = visible & (positions >= self.first[:, None, None])
        mask = in_history[:, :, None] & visible[:, None, :, :, None]  # (B, W, N, E, W)
        return self.replace(history=history, length=self.length + count), mask.reshape(B, 1, W * count, -1)
