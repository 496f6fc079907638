"""Windows of masks, and the blocks of queries and keys into which attention within a window is divided."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.visibility import Visibility, is_among
from transformer_jax.layers.dropout import flat_indices, keep_mask


class Window(NamedTuple):
    """The keys that a mask shows to each query at most, besides its other conditions.

    Attributes:
      lowest: Lowest visible value of key index - query index.
      highest: Highest visible value of key index - query index.
      dilation: The difference must be a multiple of this number.
      global_queries: (B, g) indices of queries that see every key, -1 for none; or None.
      global_keys: (B, g) indices of keys that every query sees, -1 for none; or None.
    """

    lowest: int
    highest: int
    dilation: int = 1
    global_queries: jax.Array | None = None
    global_keys: jax.Array | None = None

    @property
    def reach(self) -> int:
        """Number of tokens that a window reaches on one side at most."""
        return max(-self.lowest, self.highest)

    @property
    def span(self) -> int:
        """Number of tokens from the first to the last key of a window."""
        return self.highest - self.lowest + 1


def window_of(mask: Any) -> Window | None:
    """Return the window of a mask, or None if it has none that is limited on both sides."""
    if not isinstance(mask, Visibility):
        return None
    lowest, highest, dilation = None, None, 1
    global_queries = global_keys = None
    for relation in mask.relations:
        if relation.kind != "positions":
            continue
        if relation.lowest is not None:
            limit = relation.lowest + relation.first
            lowest = limit if lowest is None else max(lowest, limit)
        if relation.highest is not None:
            limit = relation.highest + relation.first
            highest = limit if highest is None else min(highest, limit)
        if relation.dilation > 1:
            if dilation > 1 or relation.first % relation.dilation:
                return None
            dilation = relation.dilation
        if relation.global_queries is not None or relation.global_keys is not None:
            if global_queries is not None or global_keys is not None or relation.first:
                return None
            global_queries, global_keys = relation.global_queries, relation.global_keys
    if lowest is None or highest is None or lowest > highest:
        return None
    return Window(lowest, highest, dilation, global_queries, global_keys)


class Blocks(NamedTuple):
    """The positions of blocks of queries and of the keys that their windows cover.

    Tokens with the same remainder by `dilation` form a sequence. Numbers of sequences, blocks and rows are in
    the order of the arrays that `split_queries` and `split_keys` return.

    Attributes:
      size: Queries per block.
      per_sequence: Blocks in a sequence.
      lowest: Lowest visible value of key - query within a sequence.
      highest: Highest visible value of key - query within a sequence.
      dilation: Number of sequences.
      queries: T.
    """

    size: int
    per_sequence: int
    lowest: int
    highest: int
    dilation: int
    queries: int

    @classmethod
    def of(cls, window: Window, queries: int, size: int) -> Blocks:
        """Divide T queries into blocks of at most `size`."""
        step = window.dilation
        lowest, highest = -(-window.lowest // step), window.highest // step
        rows = -(-queries // step)
        size = min(size, rows)
        return cls(size, -(-rows // size), lowest, highest, step, queries)

    @property
    def before(self) -> int:
        """Keys of a sequence before the first query's own that a block may read."""
        return max(0, -self.lowest)

    @property
    def key_size(self) -> int:
        """Keys that the windows of a block cover."""
        return self.size + self.highest - self.lowest

    @property
    def after(self) -> int:
        """Keys of a sequence after the last query's own that a block may read, at least 0."""
        return max(0, self.highest)

    def split_queries(self, x: jax.Array) -> jax.Array:
        """Split (B, T, ...) into blocks (n, B, size, ...)."""
        length = self.size * self.per_sequence
        x = jnp.pad(x, [(0, 0), (0, self.dilation * length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], self.per_sequence, self.size, self.dilation, *x.shape[2:])
        x = jnp.moveaxis(x, (3, 1), (0, 1))  # (dilation, per_sequence, B, size, ...)
        return x.reshape(self.dilation * self.per_sequence, *x.shape[2:])

    def join_queries(self, x: jax.Array) -> jax.Array:
        """Invert `split_queries`."""
        x = jnp.moveaxis(x.reshape(self.dilation, self.per_sequence, *x.shape[1:]), (0, 1), (3, 1))
        return x.reshape(x.shape[0], -1, *x.shape[4:])[:, : self.queries]

    def split_keys(self, x: jax.Array, *, extended: bool) -> jax.Array:
        """Arrange keys (B, S, ...) as (B, dilation * length, ...), a sequence after another.

        Args:
          x: The keys.
          extended: `x` also holds `dilation * before` keys before the first and `dilation * after` after the
            last one; otherwise these are zeros.
        """
        step = self.dilation
        left = 0 if extended else step * self.before
        right = max(0, step * self.length - left - x.shape[1])
        x = jnp.pad(x, [(0, 0), (left, right)] + [(0, 0)] * (x.ndim - 2))[:, : step * self.length]
        x = jnp.moveaxis(x.reshape(x.shape[0], self.length, step, *x.shape[2:]), 2, 1)
        return x.reshape(x.shape[0], step * self.length, *x.shape[3:])

    @property
    def length(self) -> int:
        """Keys per sequence in the result of `split_keys`."""
        return self.before + self.size * self.per_sequence + self.after

    @property
    def starts(self) -> jax.Array:
        """Index (n,) of each block's first key in the result of `split_keys`."""
        blocks = jnp.arange(self.per_sequence) * self.size + self.lowest + self.before
        return (jnp.arange(self.dilation)[:, None] * self.length + blocks).reshape(-1)

    @property
    def block_count(self) -> int:
        """Number of blocks n."""
        return self.dilation * self.per_sequence

    def first_query(self, number: jax.Array) -> jax.Array:
        """Return the index of the first query of a block; the others follow in steps of `dilation`."""
        sequence, block = jax.lax.div(number, self.per_sequence), jax.lax.rem(number, self.per_sequence)
        return block * (self.size * self.dilation) + sequence

    def indices(self, first: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
        """Return the indices (n, size) of queries and (n, key_size) of keys, counted from `first`.

        Indices of keys may be negative or beyond the last key, and indices of queries beyond the last query.
        """
        starts = jnp.arange(self.per_sequence)[:, None] * self.size
        rows = starts + jnp.arange(self.size), starts + self.lowest + jnp.arange(self.key_size)
        numbers = jnp.arange(self.dilation)[:, None, None]
        queries, keys = ((first + x * self.dilation + numbers).reshape(-1, x.shape[1]) for x in rows)
        return queries, keys


class BlockMask(NamedTuple):
    """The mask of every block, and the numbers of its queries and keys for dropout.

    Attributes:
      full: The complete mask.
      global_part: The complete mask for the global keys as keys, or None.
      global_keys: (B, g) indices of global keys, -1 for none; or None.
      words: Random words of dropout, or None.
      first: Index of this device's first query and key.
    """

    full: Visibility
    global_part: Visibility | None
    global_keys: jax.Array | None
    words: jax.Array | None
    first: jax.Array

    def of_block(self, queries: jax.Array, keys: jax.Array, count: int) -> jax.Array:
        """Return the mask (B or 1, t, s + g) of queries (t,) and keys (s,), of `count` keys altogether."""
        local = self.full.part(queries, keys)[:, 0] & ((keys >= 0) & (keys < count))
        if self.global_keys is None or self.global_part is None:
            return local
        # Global keys are counted once, in their own columns.
        local = local & ~is_among(keys[None], self.global_keys)[:, None, :]
        seen = self.global_part.part(queries, jnp.arange(self.global_keys.shape[1]))[:, 0]
        seen = seen & (self.global_keys >= 0)[:, None, :]
        rows = max(len(local), len(seen))
        parts = [jnp.broadcast_to(x, (rows, len(queries), x.shape[2])) for x in (local, seen)]
        return jnp.concatenate(parts, axis=2)

    def drop(
        self, rate: float, shape: tuple[int, ...], weights: jax.Array, queries: jax.Array, keys: jax.Array
    ) -> jax.Array:
        """Apply dropout to weights (B, G, R, t, s + g), to the same pairs as the plain form.

        Args:
          rate: Dropout rate.
          shape: (B, H, T, S) of the complete weights.
          weights: The weights.
          queries: (t,) indices of the queries.
          keys: (s,) indices of the keys.
        """
        if self.words is None:
            return weights
        B, G, R = weights.shape[:3]
        rows, heads = jnp.arange(B)[:, None, None, None], jnp.arange(G * R)[:, None, None]
        columns = jnp.broadcast_to(keys, (B, len(keys)))
        if self.global_keys is not None:
            columns = jnp.concatenate([columns, self.global_keys], axis=1)
        indices = flat_indices((rows, heads, queries[:, None], columns[:, None, None, :]), shape)
        kept = keep_mask(self.words, indices, rate).reshape(weights.shape)
        return jnp.where(kept, weights / (1.0 - rate), 0.0)


def global_part(mask: Visibility, global_keys: jax.Array) -> Visibility:
    """Return the mask whose keys are the global ones (B, g); numbers of absent ones are meaningless."""

    def gather(numbers: jax.Array) -> jax.Array:
        rows = max(len(numbers), len(global_keys))
        numbers, indices = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (numbers, global_keys))
        return jnp.take_along_axis(numbers, jnp.maximum(indices, 0), axis=1)

    return Visibility(
        tuple(
            # An array of size 1 broadcasts over all keys.
            r if r.key.shape[1] == 1 else r.replace(key=gather(r.key), kind="other")
            for r in mask.relations
        )
    )
