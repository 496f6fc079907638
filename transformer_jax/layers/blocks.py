"""Transformer blocks: attention and feed-forward sublayers on a residual stream.

Encoder and causal blocks attend to their own sequence; a translator's decoder block also attends to the source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.layers.attention.multi_head import MultiHeadAttention
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.named_points import (
    ATTENTION_OUTPUT,
    CROSS_ATTENTION,
    FEED_FORWARD_OUTPUT,
    RESIDUAL,
    SELF_ATTENTION,
    named,
)

Sublayer = Callable[[jax.Array], tuple[jax.Array, Any]]
Norm = Callable[[jax.Array], jax.Array]


def post_norm(x: jax.Array, sublayer: Sublayer, norm: Norm, rate: float, dropout_key):
    """Compute LayerNorm(x + Dropout(Sublayer(x))), the paper's form (sections 3.1 and 5.4)."""
    output, extra = sublayer(x)
    return norm(x + dropout(output, rate, dropout_key)), extra


def pre_norm(x: jax.Array, sublayer: Sublayer, norm: Norm, rate: float, dropout_key):
    """Compute x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020); the stack ends with another norm."""
    output, extra = sublayer(norm(x))
    return x + dropout(output, rate, dropout_key), extra


RESIDUALS = {"post": post_norm, "pre": pre_norm}


def _split(dropout_key: jax.Array | None, count: int):
    return [None] * count if dropout_key is None else list(jax.random.split(dropout_key, count))


class Block(nnx.Module):
    """Base class of blocks: residual sublayers, the last of which is a feed-forward network.

    Args:
      feed_forward: A module (B, N, D) -> (B, N, D).
      feed_forward_norm: Norm of the feed-forward sublayer; each sublayer has its own norm.
      norm: "post" or "pre", the position of the norms, see `post_norm` and `pre_norm`.
      dropout: Dropout rate on the output of each sublayer.
    """

    def __init__(
        self,
        *,
        feed_forward: nnx.Module,
        feed_forward_norm: nnx.Module,
        norm: Literal["post", "pre"],
        dropout: float,
    ):
        self.feed_forward, self.feed_forward_norm = feed_forward, feed_forward_norm
        self.norm, self.dropout = norm, dropout

    def _add_attention(self, x, attend: Sublayer, norm: Norm, kind: str, dropout_key):
        """Add an attention sublayer and return (x, second value of `attend`); `kind` is the scope of names."""

        def sublayer(x):
            with jax.named_scope(kind):
                output, extra = attend(x)
                return named(output, ATTENTION_OUTPUT), extra

        return RESIDUALS[self.norm](x, sublayer, norm, self.dropout, dropout_key)

    def _add_cross_attention(
        self, x, memory: KeyValueCache, memory_mask: jax.Array | None, dropout_key, return_weights: bool
    ):
        """Add the sublayer of a block's `cross_attention` and return (x, weights or None)."""
        block: Any = self

        def attend(x):
            query = block.cross_attention.query(x)
            return block.cross_attention(
                query, memory.key, memory.value, mask=memory_mask, return_weights=return_weights
            )

        return self._add_attention(x, attend, block.cross_attention_norm, CROSS_ATTENTION, dropout_key)

    def _add_feed_forward(self, x, dropout_key, scale: Callable[[jax.Array], jax.Array] = lambda x: x):
        """Add the feed-forward sublayer, the last of the block, after applying `scale` to its output."""

        def sublayer(x):
            return scale(named(self.feed_forward(x), FEED_FORWARD_OUTPUT)), None

        x, _ = RESIDUALS[self.norm](x, sublayer, self.feed_forward_norm, self.dropout, dropout_key)
        return named(x, RESIDUAL)


class EncoderBlock(Block):
    """Self-attention and a feed-forward network (Vaswani et al. 2017, section 3.1).

    Args:
      self_attention: The attention.
      self_attention_norm: Norm of the attention sublayer.
      layer_scale: Initial value of trained vectors (D,) that scale the output of each sublayer (Touvron et al.
        2021, "Going deeper with Image Transformers", equation 4), or None for no such vectors.
      width: D, needed with a layer scale.
      **options: See `Block`.
    """

    def __init__(
        self,
        *,
        self_attention: SelfAttention,
        self_attention_norm: nnx.Module,
        layer_scale: float | None = None,
        width: int = 0,
        **options: Any,
    ):
        super().__init__(**options)
        self.self_attention, self.self_attention_norm = self_attention, self_attention_norm
        first = None if layer_scale is None else jnp.full(width, layer_scale)
        self.attention_scale = None if first is None else nnx.Param(first)
        self.feed_forward_scale = None if first is None else nnx.Param(jnp.copy(first))

    def __call__(
        self,
        x: jax.Array,
        context: AttentionContext,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
        branch_factors: jax.Array | None = None,
    ):
        """Apply the block to all tokens.

        Args:
          x: (B, S, D).
          context: Mask and positions; `AttentionContext()` shows every token.
          dropout_key: Random key; dropout is on if it is passed.
          return_weights: Also return the attention weights.
          branch_factors: (2, B) factors of each row's sublayers; 0 skips a sublayer (stochastic depth, Huang et
            al. 2016).

        Returns:
          (x (B, S, D), weights (B, H, S, S) or None).
        """
        attention_key, feed_forward_key = _split(dropout_key, 2)
        weight_key = None if dropout_key is None else jax.random.fold_in(dropout_key, 2)

        def scale(x: jax.Array, layer_scale: nnx.Param | None, sublayer: int) -> jax.Array:
            if layer_scale is not None:
                x = x * layer_scale[...].astype(x.dtype)
            if branch_factors is not None:
                x = x * branch_factors[sublayer, :, None, None].astype(x.dtype)
            return x

        def attend(x):
            output, extra = self.self_attention.attend(
                x, context, return_weights=return_weights, dropout_key=weight_key
            )
            return scale(output, self.attention_scale, 0), extra

        norm = self.self_attention_norm
        x, (weights, _) = self._add_attention(x, attend, norm, SELF_ATTENTION, attention_key)
        x = self._add_feed_forward(x, feed_forward_key, lambda x: scale(x, self.feed_forward_scale, 1))
        return x, weights


class CausalBlock(Block):
    """Causal self-attention with a cache and a feed-forward network, the block of decoder-only models.

    Args:
      attention: The attention.
      attention_norm: Norm of the attention sublayer.
      cross_attention: Attention to the states of an encoder, such as a captioner's image, or None.
      cross_attention_norm: Norm of the cross-attention sublayer.
      norm: See `Block`; decoders from GPT-2 on are pre-norm.
      **options: See `Block`.
    """

    def __init__(
        self,
        *,
        attention: SelfAttention,
        attention_norm: nnx.Module,
        cross_attention: MultiHeadAttention | None = None,
        cross_attention_norm: nnx.Module | None = None,
        norm: Literal["post", "pre"] = "pre",
        **options: Any,
    ):
        super().__init__(norm=norm, **options)
        self.attention, self.attention_norm = attention, attention_norm
        self.cross_attention, self.cross_attention_norm = cross_attention, cross_attention_norm

    def __call__(
        self,
        x: jax.Array,
        context: AttentionContext,
        *,
        memory: KeyValueCache | None = None,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Apply the block to new tokens, see `SelfAttention.attend`.

        Args:
          x: (B, N, D).
          context: Mask and positions.
          memory: Projected states of the encoder for a block with cross-attention, see `project_memory`; it may
            have fewer rows, see `MultiHeadAttention`.
          cache: Keys and values of previous tokens, or None.
          at: Position of the first new token in the cache.
          dropout_key: Random key; dropout is on if it is passed.
          return_weights: Also return the attention weights, with a memory those of the cross-attention.

        Returns:
          (x (B, N, D), (weights (B, H, N, S) or None, cache or None)).
        """
        attention_key, feed_forward_key = _split(dropout_key, 2)
        own_weights = return_weights and memory is None

        def attend(x):
            return self.attention.attend(x, context, cache=cache, at=at, return_weights=own_weights)

        x, (weights, cache) = self._add_attention(x, attend, self.attention_norm, SELF_ATTENTION, attention_key)
        if memory is not None:
            assert self.cross_attention is not None, "a block without cross-attention has no memory"
            cross_key = None if dropout_key is None else jax.random.fold_in(dropout_key, 2)
            x, weights = self._add_cross_attention(x, memory, None, cross_key, return_weights)
        return self._add_feed_forward(x, feed_forward_key), (weights, cache)

    def project_memory(self, memory: jax.Array) -> KeyValueCache:
        """Project the encoder's states (B, S, D) to keys and values, once per image."""
        assert self.cross_attention is not None, "a block without cross-attention has no memory"
        return KeyValueCache.of(*self.cross_attention.project(memory))


class DecoderBlock(Block):
    """Self-attention, attention to the encoder's output, and a feed-forward network (section 3.1).

    Args:
      self_attention: Attention to the target.
      self_attention_norm: Norm of the self-attention sublayer.
      cross_attention: Attention to the encoder's output.
      cross_attention_norm: Norm of the cross-attention sublayer.
      **options: See `Block`.
    """

    def __init__(
        self,
        *,
        self_attention: SelfAttention,
        self_attention_norm: nnx.Module,
        cross_attention: MultiHeadAttention,
        cross_attention_norm: nnx.Module,
        **options: Any,
    ):
        super().__init__(**options)
        self.self_attention, self.self_attention_norm = self_attention, self_attention_norm
        self.cross_attention, self.cross_attention_norm = cross_attention, cross_attention_norm

    def __call__(
        self,
        x: jax.Array,
        context: AttentionContext,
        memory: KeyValueCache,
        *,
        memory_mask: jax.Array | None = None,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Apply the block to new tokens.

        Args:
          x: (B, N, D), all tokens of the target, or the new tokens after those in a cache.
          context: Mask and positions of the target.
          memory: Projected encoder output, see `project_memory`; it may have fewer rows, see
            `MultiHeadAttention`.
          memory_mask: Mask of the source, broadcastable to (B, H, N, S).
          cache: Keys and values of previous target tokens; None attends within x.
          at: Position of the first new token in the cache.
          dropout_key: Random key; dropout is on if it is passed.
          return_weights: Also return the weights of the cross-attention.

        Returns:
          (x (B, N, D), (cross-attention weights (B, H, N, S) or None, cache or None)).
        """
        self_key, cross_key, feed_forward_key = _split(dropout_key, 3)

        def attend_to_target(x):
            return self.self_attention.attend(x, context, cache=cache, at=at)

        norm = self.self_attention_norm
        x, (_, cache) = self._add_attention(x, attend_to_target, norm, SELF_ATTENTION, self_key)
        x, weights = self._add_cross_attention(x, memory, memory_mask, cross_key, return_weights)
        return self._add_feed_forward(x, feed_forward_key), (weights, cache)

    def project_memory(self, memory: jax.Array) -> KeyValueCache:
        """Project the encoder's output (B, S, D) to keys and values, once per sentence."""
        return KeyValueCache.of(*self.cross_attention.project(memory))
