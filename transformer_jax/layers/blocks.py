"""Encoder and decoder blocks: attention and feed-forward sub-layers on a residual stream."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers import named_points
from transformer_jax.layers.attention import KeyValueCache, MultiHeadAttention
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.named_points import named

Sublayer = Callable[[jax.Array], tuple[jax.Array, Any]]
Norm = Callable[[jax.Array], jax.Array]


class BlockConfig(Protocol):
    """The fields of a model's config that a block reads."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def norm(self) -> Literal["post", "pre"]: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def dtype(self) -> str: ...


def post_norm(x: jax.Array, sublayer: Sublayer, norm: Norm, rate: float, dropout_key):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's arrangement (sections 3.1 and 5.4)."""
    output, kept = sublayer(x)
    return norm(x + dropout(output, rate, dropout_key)), kept


def pre_norm(x: jax.Array, sublayer: Sublayer, norm: Norm, rate: float, dropout_key):
    """x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020); the stack ends with one more norm."""
    output, kept = sublayer(norm(x))
    return x + dropout(output, rate, dropout_key), kept


RESIDUALS = {"post": post_norm, "pre": pre_norm}


class NormConfig(Protocol):
    """The fields of a model's config that a normalisation reads."""

    @property
    def width(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def dtype(self) -> str: ...


def layer_norm(config: NormConfig, rngs: nnx.Rngs, *, use_bias: bool = True) -> nnx.LayerNorm:
    """Layer normalisation with the config's epsilon.

    The fast variance (mean of squares minus squared mean) of Flax's default loses digits in float32.
    """
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_bias=use_bias,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        rngs=rngs,
    )


def rms_norm(config: NormConfig, rngs: nnx.Rngs, *, use_scale: bool = True) -> nnx.RMSNorm:
    """x / rms(x), times a trained scale (Zhang & Sennrich 2019)."""
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_scale=use_scale,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        rngs=rngs,
    )


def _attention(config: BlockConfig, kernel_init, implementation, rngs) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.width,
        config.heads,
        config.kv_heads,
        use_bias=config.attention_bias,
        kernel_init=kernel_init,
        dtype=config.dtype,
        implementation=implementation,
        rngs=rngs,
    )


def _feed_forward(config: BlockConfig, kernel_init, rngs) -> FeedForward:
    return FeedForward(
        config.width,
        config.feed_forward,
        activation=config.activation,
        use_bias=True,
        kernel_init=kernel_init,
        dtype=config.dtype,
        rngs=rngs,
    )


def _split(dropout_key: jax.Array | None, count: int):
    return [None] * count if dropout_key is None else list(jax.random.split(dropout_key, count))


class EncoderBlock(nnx.Module):
    """Self-attention and a feed-forward network, each with its residual (section 3.1)."""

    def __init__(self, config: BlockConfig, *, kernel_init, implementation, rngs: nnx.Rngs):
        self.self_attention = _attention(config, kernel_init, implementation, rngs)
        self.self_attention_norm = layer_norm(config, rngs)
        self.feed_forward = _feed_forward(config, kernel_init, rngs)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.norm = config.norm
        self.dropout = config.dropout

    def __call__(self, x, *, mask=None, dropout_key=None, return_weights=False):
        """x (B, S, D), mask broadcastable to (B, H, S, S) -> (x, weights (B, H, S, S) or None)."""
        residual = RESIDUALS[self.norm]
        attention_key, feed_forward_key = _split(dropout_key, 2)

        def attend(x):
            with jax.named_scope(named_points.SELF_ATTENTION):
                output, weights = self.self_attention(
                    self.self_attention.query(x),
                    *self.self_attention.project(x),
                    mask=mask,
                    return_weights=return_weights,
                )
                return named(output, named_points.ATTENTION_OUTPUT), weights

        def feed_forward(x):
            return named(self.feed_forward(x), named_points.FEED_FORWARD_OUTPUT), None

        x, weights = residual(x, attend, self.self_attention_norm, self.dropout, attention_key)
        x, _ = residual(x, feed_forward, self.feed_forward_norm, self.dropout, feed_forward_key)
        return named(x, named_points.RESIDUAL), weights


class DecoderBlock(nnx.Module):
    """Causal self-attention, attention to the encoder's output, and a feed-forward network."""

    def __init__(self, config: BlockConfig, *, kernel_init, implementation, rngs: nnx.Rngs):
        self.self_attention = _attention(config, kernel_init, implementation, rngs)
        self.self_attention_norm = layer_norm(config, rngs)
        self.cross_attention = _attention(config, kernel_init, implementation, rngs)
        self.cross_attention_norm = layer_norm(config, rngs)
        self.feed_forward = _feed_forward(config, kernel_init, rngs)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.norm = config.norm
        self.dropout = config.dropout

    def __call__(
        self,
        x: jax.Array,
        memory: KeyValueCache,
        *,
        mask: jax.Array,
        memory_mask: jax.Array | None = None,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """One block over new tokens.

        Args:
          x: (B, N, D), all tokens of the target or the new ones behind a cache.
          memory: projected encoder output, see `project_memory`; its B may be smaller, see
            `MultiHeadAttention`.
          mask: which target tokens each new token sees, broadcastable to (B, H, N, T).
          memory_mask: broadcastable to (B, H, N, S).
          cache: keys and values of earlier target tokens; None attends within x.
          at: position in the cache of the first new token.
          dropout_key: dropout is on where given.
          return_weights: also return the weights of the cross-attention.

        Returns:
          (x (B, N, D), (cross-attention weights (B, H, N, S) or None, cache or None)).
        """
        residual = RESIDUALS[self.norm]
        self_key, cross_key, feed_forward_key = _split(dropout_key, 3)

        def attend_to_target(x):
            with jax.named_scope(named_points.SELF_ATTENTION):
                query = self.self_attention.query(x)
                key, value = self.self_attention.project(x)
                grown = cache
                if cache is not None:
                    assert at is not None, "a cache needs the position to write at"
                    grown = cache.append(key, value, at)
                    key, value = grown.key, grown.value
                output, _ = self.self_attention(query, key, value, mask=mask)
                return named(output, named_points.ATTENTION_OUTPUT), grown

        def attend_to_source(x):
            with jax.named_scope(named_points.CROSS_ATTENTION):
                output, weights = self.cross_attention(
                    self.cross_attention.query(x),
                    memory.key,
                    memory.value,
                    mask=memory_mask,
                    return_weights=return_weights,
                )
                return named(output, named_points.ATTENTION_OUTPUT), weights

        def feed_forward(x):
            return named(self.feed_forward(x), named_points.FEED_FORWARD_OUTPUT), None

        x, grown = residual(x, attend_to_target, self.self_attention_norm, self.dropout, self_key)
        x, weights = residual(x, attend_to_source, self.cross_attention_norm, self.dropout, cross_key)
        x, _ = residual(x, feed_forward, self.feed_forward_norm, self.dropout, feed_forward_key)
        return named(x, named_points.RESIDUAL), (weights, grown)

    def project_memory(self, memory: jax.Array) -> KeyValueCache:
        """Keys and values of the encoder's output (B, S, D), once per sentence."""
        return KeyValueCache.of(*self.cross_attention.project(memory))
