"""One vector of a text from the states of its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

POOLINGS = ("mean", "first", "max")


def pooled(states: jax.Array, real: jax.Array, pooling: str) -> jax.Array:
    """One vector of each text's states.

    Args:
      states: (B, T, D).
      real: (B, T) True at tokens, False at padding.
      pooling: "mean", "first" or "max", over the real tokens.

    Returns:
      (B, D) float32; of a row of padding alone 0, but for "first".
    """
    states, real = states.astype(jnp.float32), real[..., None]
    if pooling == "first":
        return states[:, 0]
    if pooling == "max":
        largest = jnp.where(real, states, jnp.finfo(jnp.float32).min).max(axis=1)
        return jnp.where(real.any(axis=1), largest, 0)
    return jnp.where(real, states, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)


def pooled_texts(states: jax.Array, segments: jax.Array, pooling: str, count: int) -> jax.Array:
    """One vector of each text of rows that several share.

    Args:
      states: (B, T, D).
      segments: (B, T) number of the text that a token is of, from 1; 0 is padding.
      pooling: see `pooled`.
      count: C, the most texts of a row.

    Returns:
      (B, C, D) float32; anything where a row has fewer texts.
    """
    states = states.astype(jnp.float32)
    own = segments[:, None, :] == jnp.arange(1, count + 1)[:, None]  # (B, C, T)
    if pooling == "first":
        return jnp.take_along_axis(states, own.argmax(axis=2)[..., None], axis=1)
    if pooling == "max":
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(own[..., None], states[:, None], lowest).max(axis=2)
    sums = jnp.einsum("bct,btd->bcd", own.astype(jnp.float32), states)
    return sums / jnp.maximum(own.sum(axis=2, keepdims=True), 1)


def normalised(vectors: jax.Array) -> jax.Array:
    """Vectors (..., D) over their Euclidean length; a vector of zeros stays one."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(length, 1e-12)
