"""Self-attention with positions, a cache, and fused projections for decoding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.multi_head import MultiHeadAttention, separate_rows, share_rows
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.positions.bias import PositionBias
from transformer_jax.layers.positions.relative import clipped_distances, shaw_key_bias, shaw_value_sum
from transformer_jax.layers.positions.rotary import Rotation, rotate
from transformer_jax.layers.stack import unstack


class AttentionContext(NamedTuple):
    """Mask and positions of N new tokens that attend to S tokens, shared by all layers.

    Attributes:
      mask: See `dot_product_attention`, broadcastable to (B, H, W N, S) for W beams; None shows all tokens.
      queries: Positions of the new tokens, (N,) or (B, W N); None if no layer reads them.
      keys: Positions of the tokens attended to, (S,) or (B, S); None if no layer reads them.
      rotation: Rotation of the new tokens, (N, n) or (B W, N, n), or None.
      bias: See `dot_product_attention`, broadcastable to (B, H, W N, S), or None.
    """

    mask: jax.Array | Visibility | KernelMask | None = None
    queries: jax.Array | None = None
    keys: jax.Array | None = None
    rotation: Rotation | None = None
    bias: jax.Array | PositionBias | None = None


class SelfAttention(MultiHeadAttention):
    """Attention of tokens to each other or to a cache; the mask makes it causal or bidirectional.

    Args:
      width: See `MultiHeadAttention`.
      heads: See `MultiHeadAttention`.
      kv_heads: See `MultiHeadAttention`.
      query_key_norm: Epsilon of an RMS norm of each head's queries and keys before their rotation (Henry et al.
        2020; Dehghani et al. 2023), or None.
      norm_scale: Give these norms trained scales.
      shaw_limit: Maximum distance with its own embeddings of keys and values (Shaw et al. 2018), or None for no
        such embeddings.
      rngs: Source of the initial values.
      **options: See `MultiHeadAttention`.
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
        has_norms = query_key_norm is not None
        self.query_norm = nnx.RMSNorm(head_width, **norm_options) if has_norms else None
        self.key_norm = nnx.RMSNorm(head_width, **norm_options) if has_norms else None
        self.shaw_limit = shaw_limit
        rows = 0 if shaw_limit is None else 2 * shaw_limit + 1
        table: dict[str, Any] = dict(embedding_init=nnx.initializers.normal(head_width**-0.5), rngs=rngs)
        self.relative_keys = nnx.Embed(rows, head_width, **table) if rows else None
        self.relative_values = nnx.Embed(rows, head_width, **table) if rows else None

    def project_all(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the queries (B, N, H, K), keys and values (B, N, G, K) of tokens (B, N, D)."""
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
        """Attend from new tokens to each other or to a cache.

        Args:
          x: (B, N, D), the new tokens.
          context: Mask and positions.
          cache: Keys and values of previous tokens, to which those of the new tokens are added; None attends
            within x.
          at: Position of the first new token in the cache; None if the cache is empty, so that the new tokens
            attend only to each other.
          return_weights: Also return the attention weights.
          dropout_key: Random key; dropout on the weights is on if it is passed.

        Returns:
          (output (B, N, D), (weights (B, H, N, S) or None, cache or None)).

        Raises:
          ValueError: The context has no positions, which embeddings of distances need.
        """
        query, key, value = self.project_all(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if cache is not None:
            # Several new tokens overwrite entries of a rolling cache that the first of them still sees.
            overwrites = cache.rolls and at is not None and x.shape[1] > 1
            previous = cache.followed_by(key, value) if overwrites else None
            cache = cache.append(key, value, jnp.zeros((), jnp.int32) if at is None else at)
            if at is not None:
                key, value = (cache.key, cache.value) if previous is None else previous
        if self.relative_keys is None:
            output, weights = self(
                query, key, value,
                mask=context.mask, bias=context.bias, return_weights=return_weights, dropout_key=dropout_key,
            )  # fmt: skip
            return output, (weights, cache)
        return self._attend_with_distances(query, key, value, context, return_weights, cache)

    def fused(self) -> SelfAttention:
        """Return a form for repeated inference with a single product for queries, keys and values."""
        return FusedSelfAttention(self)

    def _attend_with_distances(self, query, key, value, context, return_weights, cache):
        assert self.shaw_limit is not None
        assert self.relative_keys is not None
        assert self.relative_values is not None
        if context.queries is None or context.keys is None:
            raise ValueError("embeddings of distances need the positions of queries and keys")
        rows, N = query.shape[:2]
        distance = clipped_distances(context.queries, context.keys, self.shaw_limit)
        query = share_rows(query, key)
        scale = 1.0 / math.sqrt(query.shape[-1])
        bias = shaw_key_bias(query, self.relative_keys.embedding[...], distance, scale=scale)
        # The embeddings of values need the weights, so the plain form is used.
        mixed, weights = self._mix(query, key, value, context.mask, bias, True)
        relative = shaw_value_sum(weights, self.relative_values.embedding[...], distance)
        output = self._project_output(mixed + relative.astype(mixed.dtype), rows, N)
        return output, (separate_rows(weights, rows) if return_weights else None, cache)


class FusedSelfAttention(SelfAttention):
    """Self-attention with a single product for queries, keys and values, for decoding.

    A one-token step is bound by reading the weights, and on a CPU one large product reads a seventh more in the
    same time than three.

    Args:
      attention: The attention whose parameters are copied.
    """

    def __init__(self, attention: SelfAttention):
        projections = (attention.query, attention.key, attention.value)
        self.heads, self.kv_heads = (projection.out_features[0] for projection in projections[:2])
        self.dtype = attention.query.dtype
        self.kernel = nnx.Param(jnp.concatenate([p.kernel[...] for p in projections], axis=1))
        has_biases = attention.query.bias is not None
        # Keys may have no bias, which is then zero.
        biases = [jnp.zeros(p.out_features) if p.bias is None else p.bias[...] for p in projections]
        self.bias = nnx.Param(jnp.concatenate(biases)) if has_biases else None
        self.output, self.implementation = attention.output, attention.implementation
        self.weight_dropout = attention.weight_dropout
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.shaw_limit = attention.shaw_limit
        self.relative_keys, self.relative_values = attention.relative_keys, attention.relative_values

    def project_all(self, x):
        """Return the queries (B, N, H, K), keys and values (B, N, G, K) of tokens (B, N, D)."""
        kernel, x = self.kernel[...].astype(self.dtype), x.astype(self.dtype)
        fused = dense_dot_general(x, kernel, (((2,), (0,)), ((), ())))
        if self.bias is not None:
            fused = fused + self.bias[...].astype(self.dtype)
        return tuple(jnp.split(fused, [self.heads, self.heads + self.kv_heads], axis=2))


def unstack_encoder(encoder: Any) -> Any:
    """Return a copy of an encoder for repeated inference, with separate blocks and fused projections.

    Args:
      encoder: A module whose `blocks` are a stack of `EncoderBlock`, the form for training.
    """
    copy = nnx.merge(*nnx.split(encoder))
    blocks = unstack(copy.blocks)
    for block in blocks:
        block.self_attention = block.self_attention.fused()
    copy.blocks = nnx.data(blocks)
    return copy
