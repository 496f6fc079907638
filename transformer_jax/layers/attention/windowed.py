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
from transformer_jax.layers.attention.visibility import Visibility, gather_rows, is_among, rows_of
from transformer_jax.layers.custom_transpose import with_transpose
from transformer_jax.layers.dropout import flat_indices, keep_mask, random_words
from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.named_points import KERNEL_RESULTS, named

# Queries per block on a CPU: of 128, 256 and 512 the fastest for windows up to 1,024.
QUERIES = 128


class Window(NamedTuple):
    """The keys that a mask shows to each query at most, besides its other conditions.

    Attributes:
      lowest: Lowest visible value of key index - query index.
      highest: Highest visible value of key index - query index.
      dilation: The difference must be a multiple of this number.
      global_queries: (B, g) indices of queries that see every key, -1 for none; or None.
      global_keys: (B, g) indices of keys that every query sees, -1 for none; or None.
    """

    lowest: int
    highest: int
    dilation: int = 1
    global_queries: jax.Array | None = None
    global_keys: jax.Array | None = None

    @property
    def reach(self) -> int:
        """Number of tokens that a window reaches on one side at most."""
        return max(-self.lowest, self.highest)

    @property
    def span(self) -> int:
        """Number of tokens from the first to the last key of a window."""
        return self.highest - self.lowest + 1


def window_of(mask: Any) -> Window | None:
    """Return the window of a mask, or None if it has none that is limited on both sides."""
    if not isinstance(mask, Visibility):
        return None
    lowest, highest, dilation = None, None, 1
    global_queries = global_keys = None
    for relation in mask.relations:
        if relation.kind != "places":
            continue
        if relation.lowest is not None:
            limit = relation.lowest + relation.first
            lowest = limit if lowest is None else max(lowest, limit)
        if relation.highest is not None:
            limit = relation.highest + relation.first
            highest = limit if highest is None else min(highest, limit)
        if relation.dilation > 1:
            if dilation > 1 or relation.first % relation.dilation:
                return None
            dilation = relation.dilation
        if relation.global_queries is not None or relation.global_keys is not None:
            if global_queries is not None or global_keys is not None or relation.first:
                return None
            global_queries, global_keys = relation.global_queries, relation.global_keys
    if lowest is None or highest is None or lowest > highest:
        return None
    return Window(lowest, highest, dilation, global_queries, global_keys)


class Blocks(NamedTuple):
    """The positions of blocks of queries and of the keys that their windows cover.

    Tokens with the same remainder by `dilation` form a sequence. Numbers of sequences, blocks and rows are in
    the order of the arrays that `split_queries` and `split_keys` return.

    Attributes:
      size: Queries per block.
      per_sequence: Blocks in a sequence.
      lowest: Lowest visible value of key - query within a sequence.
      highest: Highest visible value of key - query within a sequence.
      dilation: Number of sequences.
      queries: T.
    """

    size: int
    per_sequence: int
    lowest: int
    highest: int
    dilation: int
    queries: int

    @classmethod
    def of(cls, window: Window, queries: int, size: int) -> Blocks:
        """Divide T queries into blocks of at most `size`."""
        step = window.dilation
        lowest, highest = -(-window.lowest // step), window.highest // step
        rows = -(-queries // step)
        size = min(size, rows)
        return cls(size, -(-rows // size), lowest, highest, step, queries)

    @property
    def before(self) -> int:
        """Keys of a sequence before the first query's own that a block may read."""
        return max(0, -self.lowest)

    @property
    def key_size(self) -> int:
        """Keys that the windows of a block cover."""
        return self.size + self.highest - self.lowest

    @property
    def after(self) -> int:
        """Keys of a sequence after the last query's own that a block may read, at least 0."""
        return max(0, self.highest)

    def split_queries(self, x: jax.Array) -> jax.Array:
        """Split (B, T, ...) into blocks (n, B, size, ...)."""
        length = self.size * self.per_sequence
        x = jnp.pad(x, [(0, 0), (0, self.dilation * length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], self.per_sequence, self.size, self.dilation, *x.shape[2:])
        x = jnp.moveaxis(x, (3, 1), (0, 1))  # (dilation, per_sequence, B, size, ...)
        return x.reshape(self.dilation * self.per_sequence, *x.shape[2:])

    def join_queries(self, x: jax.Array) -> jax.Array:
        """Invert `split_queries`."""
        x = jnp.moveaxis(x.reshape(self.dilation, self.per_sequence, *x.shape[1:]), (0, 1), (3, 1))
        return x.reshape(x.shape[0], -1, *x.shape[4:])[:, : self.queries]

    def split_keys(self, x: jax.Array, *, extended: bool) -> jax.Array:
        """Arrange keys (B, S, ...) as (B, dilation * length, ...), a sequence after another.

        Args:
          x: The keys.
          extended: `x` also holds `dilation * before` keys before the first and `dilation * after` after the
            last one; otherwise these are zeros.
        """
        step = self.dilation
        left = 0 if extended else step * self.before
        right = max(0, step * self.length - left - x.shape[1])
        x = jnp.pad(x, [(0, 0), (left, right)] + [(0, 0)] * (x.ndim - 2))[:, : step * self.length]
        x = jnp.moveaxis(x.reshape(x.shape[0], self.length, step, *x.shape[2:]), 2, 1)
        return x.reshape(x.shape[0], step * self.length, *x.shape[3:])

    @property
    def length(self) -> int:
        """Keys per sequence in the result of `split_keys`."""
        return self.before + self.size * self.per_sequence + self.after

    @property
    def starts(self) -> jax.Array:
        """Index (n,) of each block's first key in the result of `split_keys`."""
        blocks = jnp.arange(self.per_sequence) * self.size + self.lowest + self.before
        return (jnp.arange(self.dilation)[:, None] * self.length + blocks).reshape(-1)

    def indices(self, first: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
        """Return the indices (n, size) of queries and (n, key_size) of keys, counted from `first`.

        Indices of keys may be negative or beyond the last key, and indices of queries beyond the last query.
        """
        starts = jnp.arange(self.per_sequence)[:, None] * self.size
        rows = starts + jnp.arange(self.size), starts + self.lowest + jnp.arange(self.key_size)
        numbers = jnp.arange(self.dilation)[:, None, None]
        queries, keys = ((first + x * self.dilation + numbers).reshape(-1, x.shape[1]) for x in rows)
        return queries, keys


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


class BlockMask(NamedTuple):
    """The mask of every block, and the numbers of its queries and keys for dropout.

    Attributes:
      full: The complete mask.
      global_part: The complete mask for the global keys as keys, or None.
      global_keys: (B, g) indices of global keys, -1 for none; or None.
      words: Random words of dropout, or None.
      first: Index of this device's first query and key.
    """

    full: Visibility
    global_part: Visibility | None
    global_keys: jax.Array | None
    words: jax.Array | None
    first: jax.Array

    def of_block(self, queries: jax.Array, keys: jax.Array, count: int) -> jax.Array:
        """Return the mask (B or 1, t, s + g) of queries (t,) and keys (s,), of `count` keys altogether."""
        local = self.full.part(queries, keys)[:, 0] & ((keys >= 0) & (keys < count))
        if self.global_keys is None or self.global_part is None:
            return local
        # Global keys are counted once, in their own columns.
        local = local & ~is_among(keys[None], self.global_keys)[:, None, :]
        seen = self.global_part.part(queries, jnp.arange(self.global_keys.shape[1]))[:, 0]
        seen = seen & (self.global_keys >= 0)[:, None, :]
        rows = max(len(local), len(seen))
        parts = [jnp.broadcast_to(x, (rows, len(queries), x.shape[2])) for x in (local, seen)]
        return jnp.concatenate(parts, axis=2)

    def drop(
        self, rate: float, shape: tuple[int, ...], weights: jax.Array, queries: jax.Array, keys: jax.Array
    ) -> jax.Array:
        """Apply dropout to weights (B, G, R, t, s + g), to the same pairs as the plain form.

        Args:
          rate: Dropout rate.
          shape: (B, H, T, S) of the complete weights.
          weights: The weights.
          queries: (t,) indices of the queries.
          keys: (s,) indices of the keys.
        """
        if self.words is None:
            return weights
        B, G, R = weights.shape[:3]
        rows, heads = jnp.arange(B)[:, None, None, None], jnp.arange(G * R)[:, None, None]
        columns = jnp.broadcast_to(keys, (B, len(keys)))
        if self.global_keys is not None:
            columns = jnp.concatenate([columns, self.global_keys], axis=1)
        indices = flat_indices((rows, heads, queries[:, None], columns[:, None, None, :]), shape)
        kept = keep_mask(self.words, indices, rate).reshape(weights.shape)
        return jnp.where(kept, weights / (1.0 - rate), 0.0)


def global_part(mask: Visibility, global_keys: jax.Array) -> Visibility:
    """Return the mask whose keys are the global ones (B, g); numbers of absent ones are meaningless."""

    def gather(numbers: jax.Array) -> jax.Array:
        rows = max(len(numbers), len(global_keys))
        numbers, indices = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (numbers, global_keys))
        return jnp.take_along_axis(numbers, jnp.maximum(indices, 0), axis=1)

    return Visibility(
        tuple(
            # An array of size 1 broadcasts over all keys.
            r if r.key.shape[1] == 1 else r.replace(key=gather(r.key), kind="other")
            for r in mask.relations
        )
    )


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
