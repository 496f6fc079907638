"""Pooling of token states to one vector per text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

POOLINGS = ("mean", "first", "max")


def pool(states: jax.Array, real: jax.Array, pooling: str) -> jax.Array:
    """Pool the states of each text to one vector.

    Args:
      states: (B, T, D).
      real: (B, T) True at tokens, False at padding.
      pooling: "mean", "first" or "max", over the real tokens.

    Returns:
      (B, D) float32; with "mean" and "max" a row of padding gives 0.
    """
    states, real = states.astype(jnp.float32), real[..., None]
    if pooling == "first":
        return states[:, 0]
    if pooling == "max":
        largest = jnp.where(real, states, jnp.finfo(jnp.float32).min).max(axis=1)
        return jnp.where(real.any(axis=1), largest, 0)
    return jnp.where(real, states, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)


def pool_packed(states: jax.Array, segments: jax.Array, pooling: str, count: int) -> jax.Array:
    """Pool the states of each text in rows of several packed texts.

    Args:
      states: (B, T, D).
      segments: (B, T) number of each token's text, from 1; 0 is padding.
      pooling: See `pool`.
      count: C, the maximum number of texts in a row.

    Returns:
      (B, C, D) float32; undefined where a row has fewer texts.
    """
    states = states.astype(jnp.float32)
    members = segments[:, None, :] == jnp.arange(1, count + 1)[:, None]  # (B, C, T)
    if pooling == "first":
        return jnp.take_along_axis(states, members.argmax(axis=2)[..., None], axis=1)
    if pooling == "max":
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(members[..., None], states[:, None], lowest).max(axis=2)
    sums = jnp.einsum("bct,btd->bcd", members.astype(jnp.float32), states)
    return sums / jnp.maximum(members.sum(axis=2, keepdims=True), 1)


def scale_to_unit_length(vectors: jax.Array) -> jax.Array:
    """Scale vectors (..., D) to Euclidean length 1; a zero vector remains zero."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(length, 1e-12)
