"""Self-attention with positions, a cache, and joined projections for decoding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.multi_head import MultiHeadAttention, separate_rows, shared_rows
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.positions.bias import PositionBias
from transformer_jax.layers.positions.relative import clipped_distances, shaw_key_bias, shaw_value_sum
from transformer_jax.layers.positions.rotary import Rotation, rotate
from transformer_jax.layers.stack import unstack


class AttentionContext(NamedTuple):
    """What N new tokens may attend to among S, and their positions; the same for all layers.

    Attributes:
      mask: True where a token may attend, broadcastable to (B, H, W N, S), or relations that say so; None is
        everywhere. See `MultiHeadAttention` for W.
      queries: positions of the new tokens, (N,) or (B, W N); None where nothing reads them.
      keys: positions of what is attended to, (S,) or (B, S); None where nothing reads them.
      rotation: of the new tokens, (N, n) or (B W, N, n), or None.
      bias: added to the logits, broadcastable to (B, H, W N, S), or positions that it follows from, or None.
    """

    mask: jax.Array | Visibility | KernelMask | None = None
    queries: jax.Array | None = None
    keys: jax.Array | None = None
    rotation: Rotation | None = None
    bias: jax.Array | PositionBias | None = None


class SelfAttention(MultiHeadAttention):
    """Attention of tokens to the tokens that a mask shows, in a cache or in the same call.

    It is causal or bidirectional by its mask. Options add what some models do to queries, keys and values.

    Args:
      width, heads, kv_heads: as in `MultiHeadAttention`.
      query_key_norm: epsilon of an RMS norm of each head's queries and keys, before they are rotated
        (Henry et al. 2020; Dehghani et al. 2023), or None.
      norm_scale: whether those norms have trained scales.
      shaw_limit: the largest distance with an embedding of its own for keys and values
        (Shaw et al. 2018), or None for no such embeddings.
      rngs: source of the initial values.
      **options: see `MultiHeadAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        query_key_norm: float | None = None,
        norm_scale: bool = True,
        shaw_limit: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, rngs=rngs, **options)
        head_width = self.query.out_features[-1]
        norm_options: dict[str, Any] = dict(
            epsilon=query_key_norm,
            use_scale=norm_scale,
            use_fast_variance=False,
            dtype=jnp.dtype(options["dtype"]),
            rngs=rngs,
        )
        normed = query_key_norm is not None
        self.query_norm = nnx.RMSNorm(head_width, **norm_options) if normed else None
        self.key_norm = nnx.RMSNorm(head_width, **norm_options) if normed else None
        self.shaw_limit = shaw_limit
        rows = 0 if shaw_limit is None else 2 * shaw_limit + 1
        table: dict[str, Any] = dict(embedding_init=nnx.initializers.normal(head_width**-0.5), rngs=rngs)
        self.relative_keys = nnx.Embed(rows, head_width, **table) if rows else None
        self.relative_values = nnx.Embed(rows, head_width, **table) if rows else None

    def project_all(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, N, H, K), keys and values (B, N, G, K) of the tokens (B, N, D)."""
        return self.query(x), *self.project(x)

    def attend(
        self,
        x: jax.Array,
        context: AttentionContext,
        *,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        return_weights: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array | None, KeyValueCache | None]]:
        """Attends from the new tokens.

        Args:
          x: (B, N, D), the new tokens.
          context: what they may attend to, and positions.
          cache: keys and values of earlier tokens, which receives those of the new ones; None attends within x.
          at: position in the cache of the first new token; None where the cache is empty, and the new tokens
            attend to each other alone.
          return_weights: also return the attention weights.
          dropout_key: dropout on the weights is on where given.

        Returns:
          (output (B, N, D), (weights (B, H, N, S) or None, cache or None)).

        Raises:
          ValueError: no positions where embeddings of distances need them.
        """
        query, key, value = self.project_all(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if cache is not None:
            cache = cache.append(key, value, jnp.zeros((), jnp.int32) if at is None else at)
            if at is not None:
                key, value = cache.key, cache.value
        if self.relative_keys is None:
            output, weights = self(
                query, key, value,
                mask=context.mask, bias=context.bias, return_weights=return_weights, dropout_key=dropout_key,
            )  # fmt: skip
            return output, (weights, cache)
        return self._attend_with_distances(query, key, value, context, return_weights, cache)

    def _attend_with_distances(self, query, key, value, context, return_weights, cache):
        assert self.shaw_limit is not None
        assert self.relative_keys is not None
        assert self.relative_values is not None
        if context.queries is None or context.keys is None:
            raise ValueError("embeddings of distances need the positions of queries and keys")
        rows, N = query.shape[:2]
        distance = clipped_distances(context.queries, context.keys, self.shaw_limit)
        grouped = shared_rows(query, key)
        scale = 1.0 / math.sqrt(query.shape[-1])
        bias = shaw_key_bias(grouped, self.relative_keys.embedding[...], distance, scale=scale)
        # The values' embeddings need the weights, so the plain form is used.
        mixed, weights = self._mixed(grouped, key, value, context.mask, bias, True)
        mixed = mixed + shaw_value_sum(weights, self.relative_values.embedding[...], distance).astype(
            mixed.dtype
        )
        return self._joined(mixed, rows, N), (separate_rows(weights, rows) if return_weights else None, cache)


class JoinedSelfAttention(SelfAttention):
    """The same attention with one product for queries, keys and values: for decoding.

    A step of one token is bound by reading the weights, and each product hands its share of them out to
    the cores anew: one large product reads a seventh more in the same time than three.

    Args:
      attention: whose parameters are taken over.
    """

    def __init__(self, attention: SelfAttention):
        parts = (attention.query, attention.key, attention.value)
        self.heads, self.kv_heads = (part.out_features[0] for part in parts[:2])
        self.dtype = attention.query.dtype
        self.kernel = nnx.Param(jnp.concatenate([part.kernel[...] for part in parts], axis=1))
        biases = [part.bias[...] for part in parts if part.bias is not None]
        self.bias = nnx.Param(jnp.concatenate(biases)) if biases else None
        self.output, self.implementation = attention.output, attention.implementation
        self.weight_dropout = attention.weight_dropout
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.shaw_limit = attention.shaw_limit
        self.relative_keys, self.relative_values = attention.relative_keys, attention.relative_values

    def project_all(self, x):
        kernel, x = self.kernel[...].astype(self.dtype), x.astype(self.dtype)
        joined = jnp.einsum("bnd,dhk->bnhk", x, kernel)
        if self.bias is not None:
            joined = joined + self.bias[...].astype(self.dtype)
        return tuple(jnp.split(joined, [self.heads, self.heads + self.kv_heads], axis=2))


def unstacked(encoder: Any) -> Any:
    """A copy of an encoder with its blocks one by one rather than stacked, and with joined projections: for a
    program that is called many times. Training needs the stack.

    Args:
      encoder: a module whose `blocks` are a stack of `EncoderBlock`.
    """
    copy = nnx.merge(*nnx.split(encoder))
    blocks = unstack(copy.blocks)
    for block in blocks:
        block.self_attention = JoinedSelfAttention(block.self_attention)
    copy.blocks = nnx.data(blocks)
    return copy
