"""Alignment scores between decoder states and source positions, and the attention over them."""

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import masked_softmax
from transformer_jax.layers.named_points import CROSS_ATTENTION, WEIGHTS, named


def additive_scores(query: jax.Array, key: jax.Array, direction: jax.Array) -> jax.Array:
    """Compute v . tanh(query + key), a network with one hidden layer (Bahdanau et al. 2015, appendix A.1.2).

    Luong's "concat" is the same function, with the two halves of its matrix applied to states and annotations.

    Args:
      query: (B, T, A) projected states of the decoder, W_a s.
      key: (B, S, A) projected annotations, U_a h.
      direction: (A,) the vector v_a.

    Returns:
      (B, T, S) float32.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return jnp.einsum("btsa,a->bts", hidden, direction, preferred_element_type=jnp.float32)


def dot_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Compute query . key (Luong et al. 2015, "dot"); with keys W_a h it is "general".

    Args:
      query: (B, T, A).
      key: (B, S, A).

    Returns:
      (B, T, S) float32.
    """
    return jnp.einsum("bta,bsa->bts", query, key, preferred_element_type=jnp.float32)


def attend(scores: jax.Array, values: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Compute the mean of the values, weighted by the softmax of the scores.

    Args:
      scores: (B, T, S).
      values: (B, S, A).
      mask: Boolean, broadcastable to (B, T, S), True = may attend; a query that may attend to nothing gets
        zeros.

    Returns:
      (contexts (B, T, A), weights (B, T, S) float32).
    """
    with jax.named_scope(CROSS_ATTENTION):
        weights = named(masked_softmax(scores, mask), WEIGHTS)
    return jnp.einsum("bts,bsa->bta", weights.astype(values.dtype), values), weights
