"""Attention masks as relations between numbers of queries and keys, in memory linear in the length.

A mask of 32,768 queries and keys has 2^30 entries. It nearly always compares a number of the query with a
number of the key (positions, segments, padding), so only these numbers are stored, and any part of the mask is
computed when it is needed. `masks` computes complete masks from the same relations.
"""

from __future__ import annotations

import functools
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp


class Relation(flax.struct.PyTreeNode):
    """The condition lowest <= number of the key - number of the query <= highest, with exceptions.

    Attributes:
      query: (B, T) integers; a size of 1 broadcasts.
      key: (B, S) integers; a size of 1 broadcasts.
      lowest: Lower limit, or None.
      highest: Upper limit, or None.
      kind: Meaning of the numbers, from which kernels derive their form of the mask. "positions": index t +
        `first` of a query and index s of a key; "segments": numbers of documents; "real": 1 for a query, 1 or 0
        (padding) for a key; "leading": "real", with the padding of each row last; "trailing": "real", with the
        padding first.
      first: Index of the first query, see `kind`.
      dilation: The difference must also be a multiple of this number.
      global_queries: (B, g) numbers of queries that satisfy the condition with every key, -1 for none; or None.
      global_keys: (B, g) numbers of keys that satisfy the condition with every query, -1 for none; or None.
    """

    query: jax.Array
    key: jax.Array
    lowest: int | None = flax.struct.field(pytree_node=False, default=None)
    highest: int | None = flax.struct.field(pytree_node=False, default=None)
    kind: Literal["positions", "segments", "real", "leading", "trailing", "other"] = flax.struct.field(
        pytree_node=False, default="other"
    )
    first: int = flax.struct.field(pytree_node=False, default=0)
    dilation: int = flax.struct.field(pytree_node=False, default=1)
    global_queries: jax.Array | None = None
    global_keys: jax.Array | None = None

    def holds(self) -> jax.Array:
        """Return the mask (B, 1, T, S), with sizes of 1 where the numbers have them."""
        difference = (self.key[:, None, :] - self.query[:, :, None])[:, None]
        limits = []
        if self.lowest is not None:
            limits.append(difference >= self.lowest)
        if self.highest is not None:
            limits.append(difference <= self.highest)
        if self.dilation > 1:
            limits.append(difference % self.dilation == 0)
        mask = functools.reduce(jnp.logical_and, limits)
        if self.global_queries is not None:
            mask = mask | is_among(self.query, self.global_queries)[:, None, :, None]
        if self.global_keys is not None:
            mask = mask | is_among(self.key, self.global_keys)[:, None, None, :]
        return mask


class Visibility(flax.struct.PyTreeNode):
    """A mask that holds where every relation holds; masks compose with `&`.

    Attributes:
      relations: One or more relations.
    """

    relations: tuple[Relation, ...]

    def __and__(self, other: Visibility) -> Visibility:
        return Visibility(self.relations + other.relations)

    def dense(self) -> jax.Array:
        """Return the boolean mask, broadcastable to (B, H, T, S)."""
        mask = self.relations[0].holds()
        for relation in self.relations[1:]:
            mask = mask & relation.holds()
        return mask

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the mask of some queries and keys.

        Args:
          queries: (t,) indices of queries; an index beyond the end reads the last query.
          keys: (s,) indices of keys; an index beyond the end reads the last key.

        Returns:
          Boolean, broadcastable to (B, H, t, s).
        """
        return Visibility(
            tuple(
                relation.replace(
                    query=take(relation.query, queries, 1), key=take(relation.key, keys, 1), kind="other"
                )
                for relation in self.relations
            )
        ).dense()


def take(x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
    """Return elements of an axis, clipping indices; an axis of size 1, which broadcasts, is unchanged."""
    return x if x.shape[axis] == 1 else jnp.take(x, indices, axis=axis, mode="clip")


def is_among(numbers: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return whether numbers (B or 1, T) are among those chosen for each row (B, g), as (B, T) booleans."""
    return (numbers[:, :, None] == chosen[:, None, :]).any(axis=2)


def _row(numbers: jax.Array) -> jax.Array:
    return numbers[None] if numbers.ndim == 1 else numbers


def causal(queries: int, keys: int, *, first_query: int | jax.Array = 0) -> Visibility:
    """Return the mask of a query that sees the keys up to its own position; see `causal_mask`."""
    return window(queries, keys, before=None, first_query=first_query)


def window(
    queries: int,
    keys: int,
    *,
    before: int | None,
    after: int = 0,
    first_query: int | jax.Array = 0,
    dilation: int = 1,
    global_queries: jax.Array | None = None,
    global_keys: jax.Array | None = None,
) -> Visibility:
    """Return the mask of a query that sees a window of keys, see `window_mask`; `before` None has no limit.

    Args:
      queries: See `window_mask`.
      keys: See `window_mask`.
      before: See `window_mask`.
      after: See `window_mask`.
      first_query: See `window_mask`.
      dilation: See `window_mask`.
      global_queries: (B, g) positions of queries that see every key, -1 for none.
      global_keys: (B, g) positions of keys that every query sees, -1 for none.

    Raises:
      ValueError: The dilation is below 1, or the window has no key.
    """
    if dilation < 1:
        raise ValueError(f"dilation {dilation} is below 1")
    if before is not None and before + after < 0:
        raise ValueError(f"a window from {before} tokens before a query to {after} after it has no key")
    indices = jnp.asarray(first_query).reshape(-1, 1) + jnp.arange(queries)
    lowest = None if before is None else -before
    kind: Literal["positions", "other"] = "positions" if isinstance(first_query, int) else "other"
    first = first_query if isinstance(first_query, int) else 0
    relation = Relation(
        indices, _row(jnp.arange(keys)), lowest, after, kind, first, dilation, global_queries, global_keys
    )
    return Visibility((relation,))


def half_window(width: int, *, name: str = "window") -> int:
    """Return the number of keys that a symmetric window of this total width has on each side of its query.

    As in Longformer, a window of w tokens has w / 2 on each side, besides the query itself.

    Raises:
      ValueError: The width is below 2 or odd.
    """
    if width < 2 or width % 2:
        raise ValueError(
            f"{name}={width} must be an even number of at least 2: half of it lies on each side of a token"
        )
    return width // 2


def real(valid: jax.Array, keys: int | None = None) -> Visibility:
    """Return the mask that hides padded keys.

    Args:
      valid: (B, S), True at real tokens, or (B,) numbers of real tokens, which precede the padding.
      keys: S, needed if `valid` holds numbers.
    """
    kind: Literal["leading", "real"] = "leading" if valid.ndim == 1 else "real"
    valid = real_tokens(valid, keys).astype(jnp.int32)
    return Visibility((Relation(jnp.ones((1, 1), jnp.int32), valid, 0, None, kind),))


def real_from(first: jax.Array, keys: int) -> Visibility:
    """Return the mask that hides keys before the first real one of each row (B,), for `keys` keys."""
    valid = (jnp.arange(keys) >= first[:, None]).astype(jnp.int32)
    return Visibility((Relation(jnp.ones((1, 1), jnp.int32), valid, 0, None, "trailing"),))


def real_tokens(valid: jax.Array, length: int | None) -> jax.Array:
    """Return the (B, length) boolean form of `valid`, see `real`."""
    return valid.astype(bool) if valid.ndim == 2 else jnp.arange(length) < valid[:, None]


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> Visibility:
    """Return the mask of a query that sees the keys of its own segment; see `segment_mask`."""
    return Visibility((Relation(query_segments, key_segments, 0, 0, "segments"),))


def gather_rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the rows (B, g, ...) of x (B, T, ...) at indices (B, g); an index of -1 reads the first row."""
    indices = jnp.maximum(indices, 0).reshape(*indices.shape, *(1 for _ in x.shape[2:]))
    return jnp.take_along_axis(x, indices, axis=1)


def rows_of(mask: Visibility, indices: jax.Array) -> jax.Array:
    """Return the mask (B, 1, g, S) of the queries at indices (B, g)."""

    def gather(numbers: jax.Array) -> jax.Array:
        numbers = jnp.broadcast_to(numbers, (len(indices), numbers.shape[1]))
        return gather_rows(numbers, indices) if numbers.shape[1] > 1 else numbers

    return Visibility(tuple(r.replace(query=gather(r.query), kind="other") for r in mask.relations)).dense()
