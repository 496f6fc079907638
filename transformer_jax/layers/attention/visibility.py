"""Which keys a query sees, kept as a few numbers for each token rather than as one for each pair.

A mask of 32,768 queries and keys has 2^30 places. What it says is nearly always a comparison of a number of
the query with one of the key (positions, segments, realness), so those are kept, and any part of the mask is
made when it is needed. `masks` makes complete masks of the same relations.
"""

from __future__ import annotations

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp


class Relation(flax.struct.PyTreeNode):
    """lowest <= number of the key - number of the query <= highest.

    Attributes:
      query: (B, T) integers; a size of 1 stands for any.
      key: (B, S) integers, likewise.
      lowest, highest: None: no such limit.
      kind: what the numbers are, which a kernel's own form of a mask follows from: "places" are `first` + t of
        a query and s of a key, "segments" are numbers of documents, "real" is 1 of a query and 1 or 0 of a key,
        "leading" the same where the real keys of a row come first, "trailing" where they come last.
      first: see `kind`.
    """

    query: jax.Array
    key: jax.Array
    lowest: int | None = flax.struct.field(pytree_node=False, default=None)
    highest: int | None = flax.struct.field(pytree_node=False, default=None)
    kind: Literal["places", "segments", "real", "leading", "trailing", "other"] = flax.struct.field(
        pytree_node=False, default="other"
    )
    first: int = flax.struct.field(pytree_node=False, default=0)

    def holds(self) -> jax.Array:
        """(B, 1, T, S) boolean, with a size of 1 where the numbers have it."""
        difference = (self.key[:, None, :] - self.query[:, :, None])[:, None]
        limits = []
        if self.lowest is not None:
            limits.append(difference >= self.lowest)
        if self.highest is not None:
            limits.append(difference <= self.highest)
        return limits[0] if len(limits) == 1 else limits[0] & limits[1]


class Visibility(flax.struct.PyTreeNode):
    """The keys that a query sees: those for which every relation holds. They compose with `&`.

    Attributes:
      relations: at least one.
    """

    relations: tuple[Relation, ...]

    def __and__(self, other: Visibility) -> Visibility:
        return Visibility(self.relations + other.relations)

    def dense(self) -> jax.Array:
        """The boolean mask, broadcastable to (B, H, T, S)."""
        seen = self.relations[0].holds()
        for relation in self.relations[1:]:
            seen = seen & relation.holds()
        return seen

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """The mask of some queries and keys.

        Args:
          queries: (t,) their places among the T; what lies beyond is the last.
          keys: (s,) likewise.

        Returns:
          Boolean, broadcastable to (B, H, t, s).
        """
        return Visibility(
            tuple(
                relation.replace(
                    query=taken(relation.query, queries, 1), key=taken(relation.key, keys, 1), kind="other"
                )
                for relation in self.relations
            )
        ).dense()


def taken(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """x at some places of an axis; an axis of size 1 stands for any size and stays."""
    return x if x.shape[axis] == 1 else jnp.take(x, places, axis=axis, mode="clip")


def _row(numbers: jax.Array) -> jax.Array:
    return numbers[None] if numbers.ndim == 1 else numbers


def causal(queries: int, keys: int, *, first_query: int | jax.Array = 0) -> Visibility:
    """A query sees the keys up to its own position; see `causal_mask`."""
    return window(queries, keys, before=None, first_query=first_query)


def window(
    queries: int, keys: int, *, before: int | None, after: int = 0, first_query: int | jax.Array = 0
) -> Visibility:
    """A query sees the keys around its position; see `window_mask`. `before` None: all that come before."""
    own = jnp.asarray(first_query).reshape(-1, 1) + jnp.arange(queries)
    lowest = None if before is None else -before
    kind: Literal["places", "other"] = "places" if isinstance(first_query, int) else "other"
    first = first_query if isinstance(first_query, int) else 0
    return Visibility((Relation(own, _row(jnp.arange(keys)), lowest, after, kind, first),))


def real(valid: jax.Array, keys: int | None = None) -> Visibility:
    """No query sees a padded key.

    Args:
      valid: (B, S), True at real tokens, or (B,) numbers of real tokens, which come first in their rows.
      keys: S, where `valid` holds numbers.
    """
    kind: Literal["leading", "real"] = "leading" if valid.ndim == 1 else "real"
    valid = real_tokens(valid, keys).astype(jnp.int32)
    return Visibility((Relation(jnp.ones((1, 1), jnp.int32), valid, 0, None, kind),))


def real_from(first: jax.Array, keys: int) -> Visibility:
    """No query sees a key in front of its row's first one (B,), of `keys` in all."""
    valid = (jnp.arange(keys) >= first[:, None]).astype(jnp.int32)
    return Visibility((Relation(jnp.ones((1, 1), jnp.int32), valid, 0, None, "trailing"),))


def real_tokens(valid: jax.Array, length: int | None) -> jax.Array:
    """(B, length) boolean of what `real` takes."""
    return valid.astype(bool) if valid.ndim == 2 else jnp.arange(length) < valid[:, None]


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> Visibility:
    """A query sees the keys of its own segment; see `segment_mask`."""
    return Visibility((Relation(query_segments, key_segments, 0, 0, "segments"),))
