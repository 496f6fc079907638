"""Scores of how well each source position fits a decoder's state, and the mean of values that they weight."""

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import masked_softmax
from transformer_jax.layers.named_points import CROSS_ATTENTION, WEIGHTS, named


def additive_scores(query: jax.Array, key: jax.Array, direction: jax.Array) -> jax.Array:
    """v . tanh(query + key), a network of one hidden layer (Bahdanau et al. 2015, appendix A.1.2).

    With the two halves of a matrix on state and annotation applied before, it is Luong's "concat" as well.

    Args:
      query: (B, T, A) the projected states of the decoder, W_a s.
      key: (B, S, A) the projected annotations, U_a h.
      direction: (A,) v_a.

    Returns:
      (B, T, S) float32.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return jnp.einsum("btsa,a->bts", hidden, direction, preferred_element_type=jnp.float32)


def dot_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """query . key (Luong et al. 2015, "dot"); with keys W_a h it is "general".

    Args:
      query: (B, T, A).
      key: (B, S, A).

    Returns:
      (B, T, S) float32.
    """
    return jnp.einsum("bta,bsa->bts", query, key, preferred_element_type=jnp.float32)


def attend(scores: jax.Array, values: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The mean of the values, weighted by the softmax of the scores.

    Args:
      scores: (B, T, S).
      values: (B, S, A).
      mask: True = may attend, broadcastable to (B, T, S); a query that may attend to nothing gets zeros.

    Returns:
      (contexts (B, T, A), weights (B, T, S) float32).
    """
    with jax.named_scope(CROSS_ATTENTION):
        weights = named(masked_softmax(scores, mask), WEIGHTS)
    return jnp.einsum("bts,bsa->bta", weights.astype(values.dtype), values), weights
