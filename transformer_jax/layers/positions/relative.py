"""Positions as something added to attention's logits: what counts is how far a key lies from its query.

Each takes the positions of the queries (T,) or (B, T) and of the keys (S,) or (B, S), so that a decoder with
a cache, or one over packed documents, gives those of its tokens.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def distances(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Key position minus query position: (T, S), or (B, T, S) where a side is (B, ...)."""
    return key_positions[..., None, :] - query_positions[..., :, None]


def _over_heads(per_pair: jax.Array) -> jax.Array:
    """(T, S, H) or (B, T, S, H) -> (1, H, T, S) or (B, H, T, S)."""
    biases = jnp.moveaxis(per_pair, -1, -3)
    return biases[None] if biases.ndim == 3 else biases


def alibi_slopes(heads: int) -> np.ndarray:
    """(H,) 2^(-8/H), 2^(-16/H), ... (Press et al. 2022, section 3).

    Where H is no power of two: those of the next smaller power, then every other one of twice that, as
    in the authors' code.
    """

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    power = 2 ** math.floor(math.log2(heads))
    return np.concatenate([geometric(power), geometric(2 * power)[::2][: heads - power]]).astype(np.float32)


def alibi_bias(heads: int, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Each head's slope times minus the distance (Press et al. 2022): attention with linear biases.

    Returns:
      (1, H, T, S) or (B, H, T, S) float32, 0 on the diagonal and falling to both sides.
    """
    far = jnp.abs(distances(query_positions, key_positions)).astype(jnp.float32)
    return _over_heads(-far[..., None] * alibi_slopes(heads))


def relative_buckets(distance: jax.Array, *, buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
    """The bucket of each distance (Raffel et al. 2020, section 2.1): one each near by, wider ones further off.

    Half of the buckets are single distances; the other half grow geometrically up to `max_distance`, and the
    last holds all beyond.

    Args:
      distance: integers, key position minus query position.
      buckets: number of buckets, 32 in the paper.
      max_distance: 128 in the paper.
      bidirectional: half of the buckets are for keys behind the query and half for those ahead;
        otherwise keys ahead, which a decoder does not see, share bucket 0.

    Returns:
      int32 of distance's shape, 0 to buckets - 1.
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
    """T5's relative bias: a trained number for each head and bucket of distances (Raffel et al. 2020).

    Args:
      table: (buckets, H), shared by all layers in the paper.
      query_positions, key_positions: see above.
      max_distance, bidirectional: see `relative_buckets`.

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
    """Rows of a Shaw table: distances cut to -limit ... limit, plus limit (Shaw et al. 2018, section 3.2)."""
    return jnp.clip(distances(query_positions, key_positions), -limit, limit) + limit


def shaw_key_bias(query: jax.Array, table: jax.Array, rows: jax.Array, *, scale: float) -> jax.Array:
    """What relative key embeddings add to the logits: scale * q_i a_ij (Shaw et al. 2018, equation 4).

    Args:
      query: (B, T, H, K).
      table: (2 * limit + 1, K), one embedding for each distance, shared by the heads.
      rows: (T, S) or (B, T, S) from `clipped_distances`.
      scale: of the logits, 1 / sqrt(K) in the paper.

    Returns:
      (B, H, T, S) float32.
    """
    # One product with each of the few embeddings, then a choice, rather than one with each of T S.
    products = jnp.einsum("bthk,rk->bthr", query * jnp.asarray(scale, query.dtype), table.astype(query.dtype),
                          preferred_element_type=jnp.float32)  # fmt: skip
    chosen = jnp.broadcast_to(rows, (query.shape[0], *rows.shape[-2:]))[:, :, None]
    return jnp.moveaxis(jnp.take_along_axis(products, chosen, axis=-1), 2, 1)


def shaw_value_sum(weights: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    """What relative value embeddings add to the output: sum_j w_ij a_ij (Shaw et al. 2018, equation 3).

    Args:
      weights: (B, H, T, S) attention weights.
      table: (2 * limit + 1, width).
      rows: (T, S) or (B, T, S) from `clipped_distances`.

    Returns:
      (B, T, H, width) float32.
    """
    # The weights of all keys at one distance are added up first, since they share an embedding.
    of_row = rows[..., None] == jnp.arange(table.shape[0])  # (..., T, S, R)
    of_row = jnp.broadcast_to(of_row, (weights.shape[0], *of_row.shape[-3:])).astype(weights.dtype)
    per_row = jnp.einsum("bhts,btsr->bthr", weights, of_row)
    return jnp.einsum("bthr,rv->bthv", per_row, table.astype(jnp.float32), preferred_element_type=jnp.float32)
