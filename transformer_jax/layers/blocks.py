"""Blocks of a Transformer: attention and feed-forward sublayers on a residual stream.

They differ in their attention sublayers: to the same sequence, and in a translator's decoder to the source too.
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
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's arrangement (sections 3.1 and 5.4)."""
    output, kept = sublayer(x)
    return norm(x + dropout(output, rate, dropout_key)), kept


def pre_norm(x: jax.Array, sublayer: Sublayer, norm: Norm, rate: float, dropout_key):
    """x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020); the stack ends with one more norm."""
    output, kept = sublayer(norm(x))
    return x + dropout(output, rate, dropout_key), kept


RESIDUALS = {"post": post_norm, "pre": pre_norm}


def _split(dropout_key: jax.Array | None, count: int):
    return [None] * count if dropout_key is None else list(jax.random.split(dropout_key, count))


class Block(nnx.Module):
    """Base of the blocks: residual sublayers, the last of them a feed-forward network.

    Args:
      feed_forward: a module (B, N, D) -> (B, N, D).
      feed_forward_norm: its norm, of any kind; each sublayer has its own.
      norm: "post" or "pre": where the norms stand, see `post_norm` and `pre_norm`.
      dropout: rate on the output of each sublayer.
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
        """Adds an attention sublayer: (x, second value of `attend`); `kind` is a scope of `named_points`."""

        def sublayer(x):
            with jax.named_scope(kind):
                output, kept = attend(x)
                return named(output, ATTENTION_OUTPUT), kept

        return RESIDUALS[self.norm](x, sublayer, norm, self.dropout, dropout_key)

    def _add_feed_forward(self, x, dropout_key, scaled: Callable[[jax.Array], jax.Array] = lambda x: x):
        """Adds the feed-forward sublayer, which ends the block; `scaled` is done to what it adds."""

        def sublayer(x):
            return scaled(named(self.feed_forward(x), FEED_FORWARD_OUTPUT)), None

        x, _ = RESIDUALS[self.norm](x, sublayer, self.feed_forward_norm, self.dropout, dropout_key)
        return named(x, RESIDUAL)


class EncoderBlock(Block):
    """Self-attention and a feed-forward network (Vaswani et al. 2017, section 3.1).

    Args:
      self_attention: of the block.
      self_attention_norm: its norm.
      layer_scale: what each sublayer adds is multiplied by a trained vector (D,) that begins with this value
        (Touvron et al. 2021, "Going deeper with Image Transformers", equation 4); None has none.
      width: D, where there is a layer scale.
      **options: see `Block`.
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
        """One block over all tokens.

        Args:
          x: (B, S, D).
          context: which tokens see each other; `AttentionContext()` shows every token.
          dropout_key: dropout is on where given.
          return_weights: also return the attention weights.
          branch_factors: (2, B), by which each row's sublayers are multiplied; 0 leaves one out (stochastic
            depth, Huang et al. 2016).

        Returns:
          (x (B, S, D), weights (B, H, S, S) or None).
        """
        attention_key, feed_forward_key = _split(dropout_key, 2)
        weight_key = None if dropout_key is None else jax.random.fold_in(dropout_key, 2)

        def scaled(x: jax.Array, scale: nnx.Param | None, number: int) -> jax.Array:
            if scale is not None:
                x = x * scale[...].astype(x.dtype)
            if branch_factors is not None:
                x = x * branch_factors[number, :, None, None].astype(x.dtype)
            return x

        def attend(x):
            output, kept = self.self_attention.attend(
                x, context, return_weights=return_weights, dropout_key=weight_key
            )
            return scaled(output, self.attention_scale, 0), kept

        norm = self.self_attention_norm
        x, (weights, _) = self._add_attention(x, attend, norm, SELF_ATTENTION, attention_key)
        x = self._add_feed_forward(x, feed_forward_key, lambda x: scaled(x, self.feed_forward_scale, 1))
        return x, weights


class CausalBlock(Block):
    """The block of decoder-only models: an `EncoderBlock` with a cache, pre-norm as from GPT-2 on.

    Args:
      attention: of the block.
      attention_norm: its norm.
      norm: see `Block`.
      **options: see `Block`.
    """

    def __init__(
        self,
        *,
        attention: SelfAttention,
        attention_norm: nnx.Module,
        norm: Literal["post", "pre"] = "pre",
        **options: Any,
    ):
        super().__init__(norm=norm, **options)
        self.attention, self.attention_norm = attention, attention_norm

    def __call__(
        self,
        x: jax.Array,
        context: AttentionContext,
        *,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """x (B, N, D) -> (x, (weights (B, H, N, S) or None, cache or None)); see `SelfAttention.attend`."""
        attention_key, feed_forward_key = _split(dropout_key, 2)

        def attend(x):
            return self.attention.attend(x, context, cache=cache, at=at, return_weights=return_weights)

        x, kept = self._add_attention(x, attend, self.attention_norm, SELF_ATTENTION, attention_key)
        return self._add_feed_forward(x, feed_forward_key), kept


class DecoderBlock(Block):
    """Self-attention, attention to the encoder's output, and a feed-forward network (section 3.1).

    Args:
      self_attention, cross_attention: of the block.
      self_attention_norm, cross_attention_norm: their norms.
      **options: see `Block`.
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
        """One block over new tokens.

        Args:
          x: (B, N, D), all tokens of the target or the new ones behind a cache.
          context: which target tokens each new token sees.
          memory: projected encoder output, see `project_memory`; its B may be smaller, see
            `MultiHeadAttention`.
          memory_mask: broadcastable to (B, H, N, S).
          cache: keys and values of earlier target tokens; None attends within x.
          at: position in the cache of the first new token.
          dropout_key: dropout is on where given.
          return_weights: also return the weights of the cross-attention.

        Returns:
          (x (B, N, D), (cross-attention weights (B, H, N, S) or None, cache or None)).
        """
        self_key, cross_key, feed_forward_key = _split(dropout_key, 3)

        def attend_to_target(x):
            return self.self_attention.attend(x, context, cache=cache, at=at)

        def attend_to_source(x):
            query = self.cross_attention.query(x)
            return self.cross_attention(
                query, memory.key, memory.value, mask=memory_mask, return_weights=return_weights
            )

        norm, cross_norm = self.self_attention_norm, self.cross_attention_norm
        x, (_, cache) = self._add_attention(x, attend_to_target, norm, SELF_ATTENTION, self_key)
        x, weights = self._add_attention(x, attend_to_source, cross_norm, CROSS_ATTENTION, cross_key)
        return self._add_feed_forward(x, feed_forward_key), (weights, cache)

    def project_memory(self, memory: jax.Array) -> KeyValueCache:
        """Keys and values of the encoder's output (B, S, D), once per sentence."""
        return KeyValueCache.of(*self.cross_attention.project(memory))
