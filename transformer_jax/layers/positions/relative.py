"""Relative positions: biases on attention logits that depend on the distance between query and key.

The functions take the positions of queries (T,) or (B, T) and of keys (S,) or (B, S), which a cache and packed
documents determine.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def distances(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Return key position - query position, (T, S), or (B, T, S) if either argument has rows."""
    return key_positions[..., None, :] - query_positions[..., :, None]


def _over_heads(per_pair: jax.Array) -> jax.Array:
    """Transpose (T, S, H) or (B, T, S, H) to (1, H, T, S) or (B, H, T, S)."""
    biases = jnp.moveaxis(per_pair, -1, -3)
    return biases[None] if biases.ndim == 3 else biases


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slopes (H,) 2^(-8/H), 2^(-16/H), ... (Press et al. 2022, section 3).

    If H is not a power of two, they are those of the next lower power, followed by every second slope of the
    next higher power, as in the authors' code.
    """

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    power = 2 ** math.floor(math.log2(heads))
    return np.concatenate([geometric(power), geometric(2 * power)[::2][: heads - power]]).astype(np.float32)


def alibi_bias(heads: int, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Compute the linear biases of each head, minus its slope times the distance (Press et al. 2022).

    Args:
      heads: H.
      query_positions: (T,) or (B, T).
      key_positions: (S,) or (B, S).

    Returns:
      (1, H, T, S) or (B, H, T, S) float32, 0 on the diagonal.
    """
    distance = jnp.abs(distances(query_positions, key_positions)).astype(jnp.float32)
    return _over_heads(-distance[..., None] * alibi_slopes(heads))


def relative_buckets(distance: jax.Array, *, buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
    """Return the bucket of each distance (Raffel et al. 2020, section 2.1).

    Half of the buckets are single distances; the other half grow geometrically up to `max_distance`, and the
    last one includes all greater distances.

    Args:
      distance: Integers, key position - query position.
      buckets: Number of buckets, 32 in the paper.
      max_distance: 128 in the paper.
      bidirectional: Use half of the buckets for keys before the query and half for keys after it; otherwise
        keys after it, which a decoder does not see, share bucket 0.

    Returns:
      int32 with the shape of `distance`, 0 to buckets - 1.
    """
    ahead = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        ahead = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    single = buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / single) / math.log(max_distance / single)
    wide = single + (growth * (buckets - single)).astype(jnp.int32)
    return ahead + jnp.where(distance < single, distance, jnp.minimum(wide, buckets - 1)).astype(jnp.int32)


def bucketed_bias(
    table: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    max_distance: int,
    bidirectional: bool,
) -> jax.Array:
    """Return T5's relative bias, a trained number for each head and bucket of distances (Raffel et al. 2020).

    Args:
      table: (buckets, H), shared by all layers in the paper.
      query_positions: (T,) or (B, T).
      key_positions: (S,) or (B, S).
      max_distance: See `relative_buckets`.
      bidirectional: See `relative_buckets`.

    Returns:
      (1, H, T, S) or (B, H, T, S) float32.
    """
    bucket = relative_buckets(
        distances(query_positions, key_positions),
        buckets=table.shape[0],
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    return _over_heads(table.astype(jnp.float32)[bucket])


def clipped_distances(query_positions: jax.Array, key_positions: jax.Array, limit: int) -> jax.Array:
    """Return rows of a Shaw table, distances clipped to [-limit, limit] plus limit (Shaw et al. 2018, 3.2).

    Args:
      query_positions: (T,) or (B, T).
      key_positions: (S,) or (B, S).
      limit: Maximum distance with its own embedding.
    """
    return jnp.clip(distances(query_positions, key_positions), -limit, limit) + limit


def shaw_key_bias(query: jax.Array, table: jax.Array, rows: jax.Array, *, scale: float) -> jax.Array:
    """Compute the bias of relative key embeddings, scale * q_i a_ij (Shaw et al. 2018, equation 4).

    Args:
      query: (B, T, H, K).
      table: (2 * limit + 1, K), an embedding for each distance, shared by the heads.
      rows: (T, S) or (B, T, S) from `clipped_distances`.
      scale: Factor of the logits, 1 / sqrt(K) in the paper.

    Returns:
      (B, H, T, S) float32.
    """
    # A product with each of the few embeddings and a gather are cheaper than T S products.
    products = jnp.einsum("bthk,rk->bthr", query * jnp.asarray(scale, query.dtype), table.astype(query.dtype),
                          preferred_element_type=jnp.float32)  # fmt: skip
    indices = jnp.broadcast_to(rows, (query.shape[0], *rows.shape[-2:]))[:, :, None]
    return jnp.moveaxis(jnp.take_along_axis(products, indices, axis=-1), 2, 1)


def shaw_value_sum(weights: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    """Compute the weighted sum of relative value embeddings, sum_j w_ij a_ij (Shaw et al. 2018, equation 3).

    Args:
      weights: (B, H, T, S) attention weights.
      table: (2 * limit + 1, width).
      rows: (T, S) or (B, T, S) from `clipped_distances`.

    Returns:
      (B, T, H, width) float32.
    """
    # The weights of all keys with the same distance are summed first, because they share an embedding.
    one_hot = rows[..., None] == jnp.arange(table.shape[0])  # (..., T, S, R)
    one_hot = jnp.broadcast_to(one_hot, (weights.shape[0], *one_hot.shape[-3:])).astype(weights.dtype)
    row_weights = jnp.einsum("bhts,btsr->bthr", weights, one_hot)
    table = table.astype(jnp.float32)
    return jnp.einsum("bthr,rv->bthv", row_weights, table, preferred_element_type=jnp.float32)
