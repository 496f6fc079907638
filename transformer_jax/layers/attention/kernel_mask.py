"""Masks in the form of attention kernels: a band around the diagonal, segments, or an additive array."""

from __future__ import annotations

from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.attention.windows import Blocks


def additive_mask(mask: jax.Array, dtype: Any) -> jax.Array:
    """Return 0 where a mask is True, else half of the lowest number, because the lowest would overflow."""
    return jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(jnp.finfo(dtype).min / 2, dtype))


class KernelMask(flax.struct.PyTreeNode):
    """The relations of a `Visibility` in the form of kernels, computed once for all layers of a model.

    Attributes:
      relations: The complete mask, for attention without kernels.
      lowest: Lowest visible value of key index - query index, or None.
      highest: Highest visible value of key index - query index, or None.
      query_segments: (B, T) numbers that must equal those of the keys, or None.
      key_segments: (B, S) numbers that must equal those of the queries, or None.
      key_lengths: (B,) number of real keys of each row, at least 1, if they precede the padding and segments
        encode nothing else.
      first_keys: (B,) index of each row's first real key, if the padding precedes the real keys, the band is
        causal from index 0 on, and segments encode nothing else.
      sees_any: (B, T) whether a query sees any key, or None if every query does.
      additive: (1 or B, 1, T, S) in the compute dtype, 0 where visible, for kernels without segments.
      always: Number of last keys to which the band does not apply.
      blocks: The blocks of longer sequences that are the rows of this mask, or None. Dropout counts the weights
        of the complete sequences.
      lengths: (T, S) of the complete sequences, with `blocks`.
      key_indices: (B, S) index of each key in its complete sequence, with `blocks`.
    """

    relations: Visibility
    lowest: int | None = flax.struct.field(pytree_node=False)
    highest: int | None = flax.struct.field(pytree_node=False)
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    first_keys: jax.Array | None = None
    sees_any: jax.Array | None = None
    additive: jax.Array | None = None
    always: int = flax.struct.field(pytree_node=False, default=0)
    blocks: Blocks | None = flax.struct.field(pytree_node=False, default=None)
    lengths: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)
    key_indices: jax.Array | None = None

    @classmethod
    def from_visibility(cls, relations: Visibility, queries: int, keys: int) -> Self | None:
        """Convert a mask, or return None if kernels have no form for it.

        Args:
          relations: The mask.
          queries: T.
          keys: S.
        """
        lowest, highest = None, None
        segments, real, padding_kinds = None, None, set()
        for relation in relations.relations:
            is_band = (
                relation.dilation == 1 and relation.global_queries is None and relation.global_keys is None
            )
            if relation.kind == "positions" and is_band:
                low, high = (
                    None if limit is None else limit + relation.first
                    for limit in (relation.lowest, relation.highest)
                )
                lowest = low if lowest is None else lowest if low is None else max(lowest, low)
                highest = high if highest is None else highest if high is None else min(highest, high)
            elif relation.kind == "segments" and segments is None:
                segments = relation.query, relation.key
            elif relation.kind in ("real", "leading", "trailing"):
                real = relation.key if real is None else real & relation.key
                padding_kinds.add(relation.kind)
            else:
                return None
        # Every query must see a key of the band, or its softmax would have no denominator.
        if (highest is not None and highest < 0) or (lowest is not None and queries - 1 + lowest > keys - 1):
            return None
        if segments is None and real is None:
            return cls(relations, lowest, highest)
        lengths = first = None
        if segments is None:
            assert real is not None
            if padding_kinds == {"leading"}:
                # A kernel divides by the sum of a row's weights, so each row needs at least one key.
                lengths = jnp.maximum(real.sum(axis=1), 1)
            elif padding_kinds == {"trailing"} and highest == 0 and queries == keys:
                first = keys - real.sum(axis=1)
            segments = jnp.ones((real.shape[0], queries), jnp.int32), real
        elif real is not None:
            # Numbers of documents are not negative, so -1 matches no query.
            segments = segments[0], jnp.where(real == 1, segments[1], -1)
        query_segments, key_segments = (
            jnp.broadcast_to(x, (x.shape[0], n)) for x, n in zip(segments, (queries, keys), strict=True)
        )
        sees_any = relations.dense().any(axis=(1, 3))
        return cls(relations, lowest, highest, query_segments, key_segments, lengths, first, sees_any)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The limits (lowest, highest)."""
        return self.lowest, self.highest

    def in_band(self, queries: int, keys: int) -> np.ndarray:
        """Return the (T, S) booleans of the band."""
        columns = np.arange(keys)
        distance = columns - np.arange(queries)[:, None]
        visible = np.ones((queries, keys), bool)
        visible = visible if self.lowest is None else visible & (distance >= self.lowest)
        visible = visible if self.highest is None else visible & (distance <= self.highest)
        return visible | (columns >= keys - self.always)

    def visible(self) -> jax.Array:
        """Return the mask (B, T, S) of the band and the segments."""
        assert self.query_segments is not None
        assert self.key_segments is not None
        same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return same & self.in_band(*same.shape[1:])

    @property
    def needs_no_segments(self) -> bool:
        """True if `key_lengths` or `first_keys` express the segments."""
        return self.key_lengths is not None or self.first_keys is not None

    def with_additive(self, dtype: str) -> Self:
        """Return a copy with the segments as an array to add to the logits, unless lengths express them."""
        if self.query_segments is None or self.key_segments is None or self.needs_no_segments:
            return self
        same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return self.replace(additive=additive_mask(same, dtype)[:, None])

    def dense(self) -> jax.Array:
        """Return the boolean mask, broadcastable to (B, H, T, S)."""
        return self.relations.dense()

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the mask of some queries and keys, see `Visibility.part`."""
        return self.relations.part(queries, keys)
