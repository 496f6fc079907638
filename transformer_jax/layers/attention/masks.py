"""Attention masks: boolean, True where a query may attend to a key, broadcastable to (B, H, T, S).

They compose with `&`: `causal_mask(T, T) & padding_mask(valid)`. Models use the relations in `visibility`, from
which these masks are computed.
"""

import jax

from transformer_jax.layers.attention import visibility


def causal_mask(queries: int, keys: int, *, first_query: int | jax.Array = 0) -> jax.Array:
    """Return the mask of a query that sees the keys up to its own position.

    Args:
      queries: Number of queries T.
      keys: Number of keys S.
      first_query: Position of the first query among the keys, a number or an array (B,) with one per sentence;
        queries that continue a cache of 5 tokens start at 5.

    Returns:
      (1, 1, T, S), or (B, 1, T, S) if `first_query` is (B,).
    """
    return visibility.causal(queries, keys, first_query=first_query).dense()


def padding_mask(valid: jax.Array, keys: int | None = None) -> jax.Array:
    """Return the mask (B, 1, 1, S) that hides padded keys; see `visibility.real`."""
    return visibility.real(valid, keys).dense()


def segment_mask(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Return the mask of a query that sees the keys of its own segment, which separates packed documents.

    Args:
      query_segments: (B, T) integers, one number per document.
      key_segments: (B, S) integers.

    Returns:
      (B, 1, T, S).
    """
    return visibility.same_segment(query_segments, key_segments).dense()


def window_mask(
    queries: int,
    keys: int,
    *,
    before: int,
    after: int = 0,
    first_query: int | jax.Array = 0,
    dilation: int = 1,
    global_tokens: jax.Array | None = None,
) -> jax.Array:
    """Return the mask of a query that sees the keys at most `before` positions before and `after` after it.

    A symmetric window of w tokens (Beltagy et al. 2020) has before = after = w / 2; a causal window of w keys,
    including the query's own, has before = w - 1.

    Args:
      queries: Number of queries T.
      keys: Number of keys S.
      before: Number of visible positions before the query's own.
      after: Number of visible positions after the query's own.
      first_query: See `causal_mask`.
      dilation: Distance between visible positions; 2 shows every second one.
      global_tokens: (B, g) positions of tokens that see every key and that every query sees, -1 for none.

    Returns:
      (1, 1, T, S), or (B, 1, T, S) if `first_query` is (B,) or there are global tokens.
    """
    return visibility.window(
        queries, keys, before=before, after=after, first_query=first_query, dilation=dilation,
        global_queries=global_tokens, global_keys=global_tokens,
    ).dense()  # fmt: skip
