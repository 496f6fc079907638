"""The weights of an attention within windows, in memory that grows linearly with the length."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import masked_softmax, plain_attention
from transformer_jax.layers.attention.visibility import Visibility, gather_rows, rows_of
from transformer_jax.layers.attention.windowed import (
    QUERIES,
    BlockTensors,
    block_logits,
    replace_rows,
    without_repeats,
)
from transformer_jax.layers.attention.windows import BlockMask, Blocks, Window, global_part, window_of


class BandedWeights(NamedTuple):
    """The weights of an attention within windows, in memory linear in the length.

    Attributes:
      local: (B, H, T, W) float32, the weights of the W keys in the window of each query, except global keys.
      to_globals: (B, H, T, g) float32, the weights of the global keys, or None.
      from_globals: (B, H, g, S) float32, the weights of the global queries, or None.
      window: The window.
      keys: S.
    """

    local: jax.Array
    to_globals: jax.Array | None
    from_globals: jax.Array | None
    window: Window
    keys: int

    def dense(self) -> jax.Array:
        """Return the complete weights (B, H, T, S)."""
        B, _, T, W = self.local.shape
        blocks = Blocks.of(self.window, T, T)
        columns = jnp.arange(T)[:, None] + self.window.dilation * (blocks.lowest + jnp.arange(W))
        columns = jnp.where((columns >= 0) & (columns < self.keys), columns, self.keys)

        def scatter(weights: jax.Array, columns: jax.Array) -> jax.Array:
            return jnp.zeros((T, self.keys)).at[jnp.arange(T)[:, None], columns].add(weights, mode="drop")

        over_heads = jax.vmap(scatter, in_axes=(0, None))
        dense = jax.vmap(over_heads, in_axes=(0, None))(self.local, columns)
        if (indices := self.window.global_keys) is not None and self.to_globals is not None:
            columns = jnp.where(indices < 0, self.keys, indices)[:, None]
            columns = jnp.broadcast_to(columns, (B, T, indices.shape[1]))
            dense = dense + jax.vmap(over_heads)(self.to_globals, columns)
        if (indices := self.window.global_queries) is not None and self.from_globals is not None:
            rows = jnp.swapaxes(self.from_globals, 1, 2)
            dense = jnp.swapaxes(replace_rows(jnp.swapaxes(dense, 1, 2), indices, rows), 1, 2)
        return dense


def windowed_weights(query: jax.Array, key: jax.Array, *, mask: Visibility, scale: float) -> BandedWeights:
    """Compute the attention weights of `windowed_attention` without dropout.

    Args:
      query: (B, T, H, K).
      key: (B, S, G, K).
      mask: A mask with a window.
      scale: Factor of the logits.
    """
    window = window_of(mask)
    assert window is not None
    window = window._replace(global_keys=without_repeats(window.global_keys))
    (B, T, H, K), G, S = query.shape, key.shape[2], key.shape[1]
    blocks = Blocks.of(window, T, QUERIES)
    by_group = (query * jnp.asarray(scale, query.dtype)).reshape(B, T, G, H // G, K)
    queries = jnp.moveaxis(blocks.split_queries(by_group), 2, 4)
    keys = jnp.swapaxes(blocks.split_keys(key, extended=False), 1, 2)
    indices, part = window.global_keys, None
    of_globals = key[:, :0]
    if indices is not None:
        of_globals, part = gather_rows(key, indices), global_part(mask, indices)
    of_globals = jnp.swapaxes(of_globals, 1, 2)
    masks = BlockMask(mask, part, indices, None, jnp.zeros((), jnp.int32))
    tensors = BlockTensors(queries, keys, keys, of_globals, of_globals)
    width = blocks.key_size - blocks.size + 1
    columns = jnp.arange(blocks.size)[:, None] + jnp.arange(width)

    def run_block(block):
        query, start, numbers, key_numbers = block
        block_key, _ = tensors.block(start, blocks.key_size)
        logits, visible = block_logits(query, block_key, masks.of_block(numbers, key_numbers, S))
        weights = masked_softmax(logits, visible)
        local = jnp.take_along_axis(weights, jnp.broadcast_to(columns, (*weights.shape[:-1], width)), axis=-1)
        return local, weights[..., blocks.key_size :]

    local, to_globals = jax.lax.map(run_block, (queries, blocks.starts, *blocks.indices()))

    def joined(x: jax.Array) -> jax.Array:
        x = blocks.join_queries(jnp.moveaxis(x, 4, 2))
        return jnp.moveaxis(x.reshape(B, T, H, -1), 1, 2)

    from_globals = None
    if (rows := window.global_queries) is not None:
        _, from_globals = plain_attention(gather_rows(query, rows), key, key, rows_of(mask, rows), None, scale)
    return BandedWeights(
        joined(local), None if indices is None else joined(to_globals), from_globals, window, S
    )
