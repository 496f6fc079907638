"""Attention masks: boolean, True where a query may attend to a key, broadcastable to (B, H, T, S).

They compose with `&`: `causal_mask(T, T) & padding_mask(valid)`. Models keep `visibility`'s relations, which
these masks are made of.
"""

import jax

from transformer_jax.layers.attention import visibility


def causal_mask(queries: int, keys: int, *, first_query: int | jax.Array = 0) -> jax.Array:
    """A query sees the keys up to its own position.

    Args:
      queries: number of queries T.
      keys: number of keys S.
      first_query: position of the first query among the keys, a number or an array of one per
        sentence (B,); queries that continue a cache of 5 tokens start at 5.

    Returns:
      (1, 1, T, S), or (B, 1, T, S) where `first_query` is (B,).
    """
    return visibility.causal(queries, keys, first_query=first_query).dense()


def padding_mask(valid: jax.Array, keys: int | None = None) -> jax.Array:
    """No query sees a padded key: (B, 1, 1, S); see `visibility.real`."""
    return visibility.real(valid, keys).dense()


def segment_mask(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """A query sees the keys of its own segment: packed documents do not mix.

    Args:
      query_segments: (B, T) integers, one number per document.
      key_segments: (B, S) integers.

    Returns:
      (B, 1, T, S).
    """
    return visibility.same_segment(query_segments, key_segments).dense()


def window_mask(
    queries: int, keys: int, *, before: int, after: int = 0, first_query: int | jax.Array = 0
) -> jax.Array:
    """A query sees the keys at most `before` positions behind and `after` positions ahead of it.

    Args:
      queries, keys: numbers of queries T and keys S.
      before, after: in positions; 0 and 0 leave a query its own position.
      first_query: see `causal_mask`.

    Returns:
      (1, 1, T, S), or (B, 1, T, S) where `first_query` is (B,).
    """
    return visibility.window(queries, keys, before=before, after=after, first_query=first_query).dense()
