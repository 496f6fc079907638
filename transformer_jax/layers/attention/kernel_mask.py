"""A mask in the form that attention kernels take: a band around the diagonal, segments, an additive array."""

from __future__ import annotations

from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.visibility import Visibility


def added_to_logits(seen: jax.Array, dtype: Any) -> jax.Array:
    """What is added to logits: 0 where a key is seen, else half of the lowest number, which would overflow."""
    return jnp.where(seen, jnp.zeros((), dtype), jnp.asarray(jnp.finfo(dtype).min / 2, dtype))


class KernelMask(flax.struct.PyTreeNode):
    """Relations of a `Visibility` as kernels know them, made once for all layers of a model.

    Attributes:
      relations: the complete mask, for the forms of attention that are no kernels.
      lowest, highest: key - query of visible places lies within; None: no such limit.
      query_segments, key_segments: (B, T) and (B, S) numbers that must be equal, or None.
      key_lengths: (B,) how many keys of a row are real, at least 1, where these come first and nothing else is
        said by segments.
      first_keys: (B,) the place of a row's first real key, where the real ones come last, the band is causal
        from place 0 on, and nothing else is said by segments.
      sees_any: (B, T) whether a query sees a key at all, or None if each does.
      additive: (1 or B, 1, T, S) in the compute dtype, 0 at visible places, for kernels that know no segments.
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

    @classmethod
    def of(cls, relations: Visibility, queries: int, keys: int) -> Self | None:
        """The form of a mask, or None if no kernel has one for it.

        Args:
          relations: the mask.
          queries, keys: T and S.
        """
        lowest, highest = None, None
        segments, real, kinds = None, None, set()
        for relation in relations.relations:
            if relation.kind == "places":
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
                kinds.add(relation.kind)
            else:
                return None
        # Every query must see a key of the band, whose softmax has no denominator otherwise.
        if (highest is not None and highest < 0) or (lowest is not None and queries - 1 + lowest > keys - 1):
            return None
        if segments is None and real is None:
            return cls(relations, lowest, highest)
        lengths = first = None
        if segments is None:
            assert real is not None
            if kinds == {"leading"}:
                # A kernel divides by the weights of the keys that are there, so that a row has at least one.
                lengths = jnp.maximum(real.sum(axis=1), 1)
            elif kinds == {"trailing"} and highest == 0 and queries == keys:
                first = keys - real.sum(axis=1)
            segments = jnp.ones((real.shape[0], queries), jnp.int32), real
        elif real is not None:
            # Numbers of documents are not negative: an unreal key is of no query's document.
            segments = segments[0], jnp.where(real == 1, segments[1], -1)
        own, theirs = (
            jnp.broadcast_to(x, (x.shape[0], n)) for x, n in zip(segments, (queries, keys), strict=True)
        )
        sees_any = relations.dense().any(axis=(1, 3))
        return cls(relations, lowest, highest, own, theirs, lengths, first, sees_any)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """`lowest` and `highest`."""
        return self.lowest, self.highest

    @property
    def needs_no_segments(self) -> bool:
        """Whether numbers of real keys, or the places of the first ones, say the same."""
        return self.key_lengths is not None or self.first_keys is not None

    def with_additive(self, dtype: str) -> Self:
        """The same with segments as an array that is added to the logits, unless that can be done without."""
        if self.query_segments is None or self.key_segments is None or self.needs_no_segments:
            return self
        same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return self.replace(additive=added_to_logits(same, dtype)[:, None])

    def dense(self) -> jax.Array:
        """The boolean mask, broadcastable to (B, H, T, S)."""
        return self.relations.dense()

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """See `Visibility.part`."""
        return self.relations.part(queries, keys)
