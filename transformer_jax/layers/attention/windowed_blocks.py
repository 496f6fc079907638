"""Attention within windows by the kernels of accelerators: every block of queries is a row of a larger batch.

The row of a block holds its own keys, those of the neighboring blocks that its windows reach, and the global
keys. All rows have the same band, so that a kernel for short sequences computes them. The form without a kernel
is a plain attention over the same rows, in memory linear in the length.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.kernels import kernel_attention, refusal, report_refusal
from transformer_jax.layers.attention.plain import plain_attention
from transformer_jax.layers.attention.visibility import Visibility, gather_rows, is_among, take
from transformer_jax.layers.attention.windows import BlockMask, Blocks, Window, global_part

# Sizes of blocks and numbers of global keys are rounded up to a multiple of the kernels' block.
_MULTIPLE = 128
_HIDDEN = -1  # segment of keys that no query of a row sees


def blocks_in_rows(
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
    first: int | jax.Array = 0,
    extended: bool = False,
    kernel: str | None = None,
    requested: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Compute `local_attention` with one row for each block.

    Args:
      query: See `local_attention`.
      key: See `local_attention`.
      value: See `local_attention`.
      global_pair: See `local_attention`.
      window: See `local_attention`; it contains the query's own position.
      mask: See `local_attention`.
      scale: See `local_attention`.
      weight_dropout: See `local_attention`.
      words: See `local_attention`.
      shape: See `local_attention`.
      first: See `local_attention`.
      extended: See `local_attention`.
      kernel: The kernel to use if it supports the arguments, "cudnn" or "splash".
      requested: See `report_refusal`.
      interpret: See `kernel_attention`.
    """
    B, T = query.shape[:2]
    exact = Blocks.of(window, T, T)
    size = -(-max(exact.before, exact.after, 1) // _MULTIPLE) * _MULTIPLE
    sides = exact.before > 0, exact.after > 0
    blocks = Blocks(size, -(-T // (window.dilation * size)), -size * sides[0], size * sides[1],
                    window.dilation, T)  # fmt: skip
    queries, keys = blocks.indices(first)  # (n, size), (n, s)
    n = len(queries)

    def in_rows(x: jax.Array) -> jax.Array:
        """Reshape (n, B, ...) to (B n, ...)."""
        return jnp.swapaxes(x, 0, 1).reshape(B * n, *x.shape[2:])

    def with_neighbors(x: jax.Array, of_globals: jax.Array | None) -> jax.Array:
        """Return the keys (B n, s + g, ...) of all blocks."""
        if extended:
            # Beyond the borders are keys that no window reaches.
            missing = blocks.before - exact.before, blocks.after - exact.after
            sizes = tuple(window.dilation * count for count in missing)
            x = jnp.pad(x, [(0, 0), sizes, *((0, 0) for _ in x.shape[2:])])
        x = blocks.split_keys(x, extended=extended)
        x = x.reshape(B, window.dilation, -1, size, *x.shape[2:])
        parts = [x[:, :, k : k + blocks.per_sequence] for k in range(1 + sum(sides))]
        x = jnp.concatenate(parts, axis=3)
        x = x.reshape(B * n, x.shape[3], *x.shape[4:])
        if of_globals is None:
            return x
        return jnp.concatenate([x, jnp.repeat(of_globals, n, axis=0)], axis=1)

    count, indices = 0, window.global_keys
    global_key = global_value = None
    if global_pair is not None and indices is not None:
        missing = -indices.shape[1] % _MULTIPLE
        count = indices.shape[1] + missing
        global_key, global_value = (jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) for x in global_pair)
        indices = jnp.pad(indices, [(0, 0), (0, missing)], constant_values=-1)
    query = in_rows(blocks.split_queries(query))
    key, value = with_neighbors(key, global_key), with_neighbors(value, global_value)
    form: KernelMask | None = None
    reason: str | None = None
    if extended and words is not None:
        reason = "dropout on the weights of a sequence over several devices"
    elif kernel is not None:
        band = exact.lowest - blocks.lowest, exact.highest - blocks.lowest
        form = _kernel_mask(mask, band, queries, keys, shape[2:], indices, count, B)
        reason = "the mask"
        if form is not None:
            reason = refusal(kernel, query, key, value, form, None, has_dropout=words is not None)
    if kernel is not None and reason is not None:
        report_refusal(kernel, reason, "windowed", requested=requested)
    if form is not None and kernel is not None and reason is None:
        if words is not None:
            key_indices = jnp.broadcast_to(keys, (B, *keys.shape)).reshape(B * n, -1)
            if indices is not None:
                key_indices = jnp.concatenate([key_indices, jnp.repeat(indices, n, axis=0)], axis=1)
            form = form.replace(blocks=blocks, lengths=shape[2:], key_indices=key_indices)
        output = kernel_attention(
            kernel, query, key, value, mask=form, scale=scale, weight_dropout=weight_dropout, words=words,
            interpret=interpret,
        )  # fmt: skip
    else:
        part = None if indices is None else global_part(mask, indices)
        block_mask = BlockMask(mask, part, indices, words, jnp.zeros((), jnp.int32))
        dense = jax.vmap(lambda q, k: block_mask.of_block(q, k, shape[3]))(queries, keys)
        dense = in_rows(jnp.broadcast_to(dense, (n, B, *dense.shape[2:])))

        def drop(weights: jax.Array) -> jax.Array:
            by_block = weights.reshape(B, n, weights.shape[1], 1, *weights.shape[2:])
            drop_block = functools.partial(block_mask.drop, weight_dropout, shape)
            return jax.vmap(drop_block, (1, 0, 0), 1)(by_block, queries, keys).reshape(weights.shape)

        drop_or_none = None if words is None else drop
        output, _ = plain_attention(query, key, value, dense[:, None], None, scale, drop_or_none)
    return blocks.join_queries(jnp.swapaxes(output.reshape(B, n, *output.shape[1:]), 0, 1))


def _kernel_mask(
    mask: Visibility,
    band: tuple[int, int],
    queries: jax.Array,
    keys: jax.Array,
    lengths: tuple[int, ...],
    global_keys: jax.Array | None,
    count: int,
    rows: int,
) -> KernelMask | None:
    """Return the mask of all blocks, or None if kernels have no form for it.

    Args:
      mask: The mask of the complete sequence.
      band: Lowest and highest visible value of column - row in a block.
      queries: (n, t) indices of the blocks' queries.
      keys: (n, s) indices of the blocks' keys.
      lengths: (T, S).
      global_keys: (B, g) indices of global keys, or None.
      count: g.
      rows: B.
    """
    besides_window = Visibility(tuple(r for r in mask.relations if r.kind != "positions"))
    if len(mask.relations) - len(besides_window.relations) != 1:
        return None
    query_segments, key_segments = jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    if besides_window.relations:
        form = KernelMask.from_visibility(besides_window, *lengths)
        if form is None or form.query_segments is None or form.key_segments is None:
            return None
        query_segments, key_segments = form.query_segments, form.key_segments
    in_block = take(query_segments, jnp.maximum(queries, 0).reshape(-1), 1)
    in_block = jnp.broadcast_to(in_block, (rows, queries.size)).reshape(-1, queries.shape[1])
    local = take(key_segments, keys.reshape(-1), 1)
    local = jnp.broadcast_to(local, (rows, keys.size)).reshape(rows, *keys.shape)
    hidden = (keys < 0) | (keys >= lengths[1])
    if global_keys is not None:
        flat = jnp.broadcast_to(keys.reshape(1, -1), (rows, keys.size))
        hidden = hidden | is_among(flat, global_keys).reshape(rows, *keys.shape)
    local = jnp.where(hidden, _HIDDEN, local).reshape(-1, keys.shape[1])
    if global_keys is not None:
        numbers = jnp.broadcast_to(key_segments, (rows, key_segments.shape[1]))
        numbers = gather_rows(numbers, global_keys) if numbers.shape[1] > 1 else numbers
        numbers = jnp.where(global_keys < 0, _HIDDEN, numbers)
        local = jnp.concatenate([local, jnp.repeat(numbers, len(queries), axis=0)], axis=1)
    form = KernelMask(Visibility(()), *band, in_block, local, always=count)
    return form.replace(sees_any=form.visible().any(axis=2))
