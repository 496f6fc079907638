"""Exact attention within a window, in time and memory that grow linearly with the length.

Queries are processed in blocks. A block attends to the one part of the keys that its windows cover, and to the
global keys, which every query sees (Beltagy et al. 2020, section 3.1). As in `chunked`, the backward pass keeps
one number per query, from which it recomputes the weights of a block. A dilated window is a window without
gaps over every `dilation`-th token, so the tokens are first separated into `dilation` sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import plain_attention
from transformer_jax.layers.attention.visibility import Visibility, gather_rows, rows_of
from transformer_jax.layers.attention.windows import BlockMask, Blocks, Window, global_part, window_of
from transformer_jax.layers.custom_transpose import with_transpose
from transformer_jax.layers.dropout import flat_indices, keep_mask, random_words
from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.named_points import KERNEL_RESULTS, named

# Queries per block on a CPU: of 128, 256 and 512 the fastest for windows up to 1,024.
QUERIES = 128


class _Static(NamedTuple):
    """Settings known at tracing time.

    Attributes:
      blocks: See `Blocks`.
      rate: Dropout rate on the weights.
      shape: (B, H, T, S) of the complete weights, whose indices dropout reads.
    """

    blocks: Blocks
    rate: float
    shape: tuple[int, int, int, int]


class BlockTensors(NamedTuple):
    """The differentiable arguments, or their tangents or cotangents.

    Attributes:
      query: (n, B, G, R, t, K) blocks of scaled queries.
      key: (B, G, length, K), see `Blocks.split_keys`.
      value: (B, G, length, V).
      global_key: (B, G, g, K).
      global_value: (B, G, g, V).
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    global_key: jax.Array
    global_value: jax.Array

    def block(self, start: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values (B, G, size + g, K) of a block."""

        def join(buffer: jax.Array, of_globals: jax.Array) -> jax.Array:
            local = jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=2)
            return jnp.concatenate([local, of_globals], axis=2) if of_globals.shape[2] else local

        return join(self.key, self.global_key), join(self.value, self.global_value)


def block_logits(query: jax.Array, key: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (logits (B, G, R, t, s) float32, the lowest number at masked pairs; the mask with their axes)."""
    mask = mask[:, None, None]
    logits = float32_product("bgrtk,bgsk->bgrts", query, key)
    return jnp.where(mask, logits, jnp.finfo(jnp.float32).min), mask


def _weighted_sums(static, mask, queries, keys, log_denominator, query, key, value):
    """Return (P V (B, G, R, t, V), sum of P (B, G, R, t)) for P = exp(logits - log_denominator)."""
    logits, visible = block_logits(query, key, mask.of_block(queries, keys, static.shape[3]))
    weights = jnp.where(visible, jnp.exp(logits - log_denominator[..., None]), 0.0)
    mixing = mask.drop(static.rate, static.shape, weights, queries, keys).astype(value.dtype)
    return float32_product("bgrts,bgsv->bgrtv", mixing, value), weights.sum(axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(static: _Static, tensors: BlockTensors, mask: BlockMask) -> jax.Array:
    """Return the output (n, B, G, R, t, V) in the query's dtype."""
    return _forward(static, tensors, mask)[0]


def _forward(static: _Static, tensors: BlockTensors, mask: BlockMask):
    """Return (output, residuals for the derivatives)."""
    blocks = static.blocks

    def run_block(block):
        query, start, queries, keys = block
        key, value = tensors.block(start, blocks.key_size)
        logits, visible = block_logits(query, key, mask.of_block(queries, keys, static.shape[3]))
        maximum = logits.max(axis=-1)
        weights = jnp.where(visible, jnp.exp(logits - maximum[..., None]), 0.0)
        total = weights.sum(axis=-1)
        total = jnp.where(total == 0.0, 1.0, total)
        mixing = mask.drop(static.rate, static.shape, weights, queries, keys).astype(value.dtype)
        output = float32_product("bgrts,bgsv->bgrtv", mixing, value) / total[..., None]
        return output.astype(query.dtype), maximum + jnp.log(total)

    inputs = tensors.query, blocks.starts, *blocks.indices(mask.first)
    output, log_denominator = jax.lax.map(run_block, inputs)
    # Named, so that rematerialization keeps these results instead of the products of every block.
    output, log_denominator = named(output, KERNEL_RESULTS), named(log_denominator, KERNEL_RESULTS)
    return output, (tensors, mask, output, log_denominator)


def _backward(static: _Static, residuals, gradient: jax.Array) -> BlockTensors:
    """Return the cotangents of the tensors; see `chunked` for the formula."""
    tensors, mask, output, log_denominator = residuals
    blocks = static.blocks
    gradient = gradient.astype(jnp.float32)
    product = jnp.einsum("nbgrtv,nbgrtv->nbgrt", gradient, output, preferred_element_type=jnp.float32)

    def run_block(sums, block):
        query, start, queries, keys, log_denominator, gradient, product = block
        weighted_sums = functools.partial(_weighted_sums, static, mask, queries, keys, log_denominator)
        _, pull_back = jax.vjp(weighted_sums, query, *tensors.block(start, blocks.key_size))
        d_query, *d_block = pull_back((gradient, -product))

        # The sum is updated in place, so that a block costs as much as its own keys.
        def add(buffer: jax.Array, x: jax.Array) -> jax.Array:
            x = x[:, :, : blocks.key_size].astype(jnp.float32)
            x = x + jax.lax.dynamic_slice_in_dim(buffer, start, blocks.key_size, axis=2)
            return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, axis=2)

        local = [add(total, x) for total, x in zip(sums[:2], d_block, strict=True)]
        of_globals = [total + x[:, :, blocks.key_size :] for total, x in zip(sums[2:], d_block, strict=True)]
        return (*local, *of_globals), d_query

    inputs = (
        tensors.query, blocks.starts, *blocks.indices(mask.first), log_denominator, gradient, product,
    )  # fmt: skip
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in tensors[1:])
    sums, d_query = jax.lax.scan(run_block, zeros, inputs)
    return BlockTensors(d_query, *(x.astype(like.dtype) for x, like in zip(sums, tensors[1:], strict=True)))


def _tangent(static: _Static, residuals, tangents: BlockTensors) -> jax.Array:
    """Return the tangent of the output, the transpose of `_backward`."""
    tensors, mask, output, log_denominator = residuals
    size = static.blocks.key_size

    def run_block(block):
        query, d_query, start, queries, keys, log_denominator = block
        weighted_sums = functools.partial(_weighted_sums, static, mask, queries, keys, log_denominator)
        primals = query, *tensors.block(start, size)
        return jax.jvp(weighted_sums, primals, (d_query, *tangents.block(start, size)))[1]

    inputs = (
        tensors.query, tangents.query, static.blocks.starts, *static.blocks.indices(mask.first),
        log_denominator,
    )  # fmt: skip
    d_mixed, d_total = jax.lax.map(run_block, inputs)
    return (d_mixed - d_total[..., None] * output).astype(output.dtype)


@_attend.defjvp
def _attend_jvp(static: _Static, primals, tangents):
    output, residuals = _forward(static, *primals)
    tangent, backward = functools.partial(_tangent, static), functools.partial(_backward, static)
    return output, with_transpose(tangent, backward, residuals, tangents[0])


def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    global_pair: tuple[jax.Array, jax.Array] | None,
    *,
    window: Window,
    mask: Visibility,
    scale: float,
    weight_dropout: float,
    words: jax.Array | None,
    shape: tuple[int, int, int, int],
    size: int = QUERIES,
    first: int | jax.Array = 0,
    extended: bool = False,
) -> jax.Array:
    """Attend within windows and to global keys; global queries are treated like the others.

    Args:
      query: (B, t, H, K), the queries of this device.
      key: (B, s, G, K), the keys that they see.
      value: (B, s, G, V).
      global_pair: Global keys (B, g, G, K) and values (B, g, G, V), or None.
      window: The window of the mask.
      mask: The mask of the complete sequence.
      scale: Factor of the logits.
      weight_dropout: Dropout rate on the weights.
      words: Random words of dropout, or None.
      shape: (B, H, T, S) of the complete weights.
      size: Queries per block.
      first: Index of the first query in the complete sequence.
      extended: `key` and `value` begin and end with the borders that the first and last queries see.

    Returns:
      (B, t, H, V) in the query's dtype.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    blocks = Blocks.of(window, T, size)
    query = (query * jnp.asarray(scale, query.dtype)).reshape(B, T, G, H // G, K)
    keys, values = (jnp.swapaxes(blocks.split_keys(x, extended=extended), 1, 2) for x in (key, value))
    if global_pair is None:
        global_pair = key[:, :0], value[:, :0]
    tensors = BlockTensors(
        jnp.moveaxis(blocks.split_queries(query), 2, 4), keys, values,
        *(jnp.swapaxes(x, 1, 2) for x in global_pair),
    )  # fmt: skip
    part = None if window.global_keys is None else global_part(mask, window.global_keys)
    first = jnp.asarray(first, jnp.int32)
    masks = BlockMask(mask, part, window.global_keys, words, first)
    output = _attend(_Static(blocks, weight_dropout, shape), tensors, masks)
    return blocks.join_queries(jnp.moveaxis(output, 4, 2)).reshape(B, T, H, value.shape[3])


def replace_rows(x: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Return x (B, T, ...) with `rows` (B, g, ...) at indices (B, g); an index of -1 changes nothing."""
    indices = jnp.where(indices < 0, x.shape[1], indices)
    return jax.vmap(lambda x, n, new: x.at[n].set(new.astype(x.dtype), mode="drop"))(x, indices, rows)


def without_repeats(indices: jax.Array | None) -> jax.Array | None:
    """Return indices (B, g) in which -1 replaces repeated ones, so that no key is counted twice."""
    if indices is None:
        return None
    earlier = jnp.tril(jnp.ones((indices.shape[1],) * 2, bool), -1)
    repeated = ((indices[:, :, None] == indices[:, None, :]) & earlier).any(axis=2)
    return jnp.where(repeated, -1, indices)


def windowed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Visibility,
    scale: float,
    weight_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    local: Callable[..., jax.Array] = local_attention,
    **options: Any,
) -> jax.Array:
    """Compute `dot_product_attention` for a mask with a window, see `window_of`.

    It has derivatives of any order in forward and reverse mode.

    Args:
      query: See `dot_product_attention`.
      key: See `dot_product_attention`.
      value: See `dot_product_attention`.
      mask: See `dot_product_attention`.
      scale: See `dot_product_attention`.
      weight_dropout: See `dot_product_attention`.
      dropout_key: See `dot_product_attention`.
      local: Form of the attention within windows.
      **options: Options of `local`.

    Returns:
      (B, T, H, width) in the query's dtype.

    Raises:
      ValueError: The mask has no window.
    """
    window = window_of(mask)
    if window is None:
        raise ValueError("the mask has no window with limits on both sides")
    window = window._replace(global_keys=without_repeats(window.global_keys))
    words = None if dropout_key is None else random_words(dropout_key)
    shape = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    pair = None
    if (indices := window.global_keys) is not None:
        pair = gather_rows(key, indices), gather_rows(value, indices)
    output = local(
        query, key, value, pair, window=window, mask=mask, scale=scale, weight_dropout=weight_dropout,
        words=words, shape=shape, **options,
    )  # fmt: skip
    if (indices := window.global_queries) is None:
        return output

    def drop(weights: jax.Array) -> jax.Array:
        assert words is not None
        axes = [jnp.arange(n) for n in shape]
        coordinates = (
            axes[0][:, None, None, None], axes[1][:, None, None], indices[:, None, :, None], axes[3],
        )  # fmt: skip
        kept = keep_mask(words, flat_indices(coordinates, shape), weight_dropout)
        return jnp.where(kept, weights / (1.0 - weight_dropout), 0.0)

    rows, _ = plain_attention(
        gather_rows(query, indices), key, value, rows_of(mask, indices), None, scale,
        None if words is None else drop,
    )  # fmt: skip
    return replace_rows(output, indices, rows)
