"""Pooling of tokens by attention from a trained query."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.multi_head import MultiHeadAttention
from transformer_jax.layers.compute_options import Attention
from transformer_jax.layers.feed_forward import FeedForward


class AttentionPooling(nnx.Module):
    """A trained query that attends to all tokens, and a feed-forward layer with a residual connection.

    The source is Zhai et al. 2022, "Scaling Vision Transformers", section 3.5 (after Lee et al. 2019).

    Args:
      width: D.
      heads: H.
      feed_forward: F.
      norm: Norm of the feed-forward layer's input.
      activation: See `FeedForward`.
      implementation: See `ComputeOptions.attention`.
      rngs: Source of the initial values.
      **options: `kernel_init` and `dtype` of all layers.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        feed_forward: int,
        *,
        norm: nnx.Module,
        activation: str,
        implementation: Attention,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        init = nnx.initializers.xavier_uniform()
        self.query = nnx.Param(init(rngs.params(), (1, width), jnp.float32))
        self.attention = MultiHeadAttention(
            width, heads, heads, use_bias=True, implementation=implementation, rngs=rngs, **options
        )
        self.norm = norm
        self.feed_forward = FeedForward(
            width, feed_forward, activation=activation, use_bias=True, rngs=rngs, **options
        )

    def __call__(self, states: jax.Array) -> jax.Array:
        """Pool states (B, P, D) to (B, D)."""
        query = jnp.broadcast_to(self.query[...].astype(states.dtype), (len(states), 1, states.shape[-1]))
        x, _ = self.attention(self.attention.query(query), *self.attention.project(states))
        return (x + self.feed_forward(self.norm(x)))[:, 0]
