"""Attention with dropout on the weights, as a Pallas kernel for GPUs and TPUs.

Splash attention has no dropout. cuDNN's keeps its random state in the runtime, which advances at every call: in
a loop over layers, the backward pass visits the layers in reverse and would drop other weights than the forward
pass. This kernel hashes the index of each weight instead, see `layers.dropout`, so that it drops the same
weights as the plain form in every pass, on every mesh and in a resumed run.

Forward and backward passes are those of FlashAttention-2 (Dao 2023, algorithms 1 and 2) with dropout after the
softmax (Dao et al. 2022, appendix B.4).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.attention.windows import Blocks
from transformer_jax.layers.dropout import flat_indices, keep_mask
from transformer_jax.layers.named_points import KERNEL_RESULTS, named

# Rows and columns of a block of weights. Lengths are padded to multiples.
_BLOCKS = {"gpu": 64, "tpu": 128}
# Largest blocks on a TPU for heads of up to 512 bytes a token, and for wider ones.
_MAX_TPU_BLOCK, _MAX_TPU_BLOCK_OF_WIDE = 512, 256
# Segments of padded queries and keys, which occur in no mask.
_PADDED_QUERY, _PADDED_KEY = -3, -2
_LOWEST = float(np.finfo(np.float32).min)


class _KernelConfig(NamedTuple):
    """Constants of the kernels.

    Attributes:
      shape: (H, T, S) of the complete array of weights, without padding, over all devices.
      band: Lowest and highest visible value of key index - query index.
      always_from: Index of the first key to which the band does not apply, a multiple of `key_block`; or None.
      blocks: See `KernelMask`.
      scale: Factor of the logits.
      rate: Dropout rate.
      query_block: Queries of a block.
      key_block: Keys of a block.
      target: "gpu", "tpu" or "interpret".
    """

    shape: tuple[int, int, int]
    band: tuple[int | None, int | None]
    always_from: int | None
    blocks: Blocks | None
    scale: float
    rate: float
    query_block: int
    key_block: int
    target: str

    def key_blocks(self, block: Any, count: int) -> tuple[tuple[Any, Any], ...]:
        """Return the ranges of key blocks, of `count`, that a block of queries sees."""
        lowest, highest = self.band
        first, size = block * self.query_block, self.key_block
        start = 0 if lowest is None else jax.lax.div(jnp.maximum(first + lowest, 0), size)
        in_band = count if self.always_from is None else self.always_from // size
        stop: Any = in_band
        if highest is not None:
            last = first + self.query_block - 1 + highest
            stop = jnp.minimum(jax.lax.div(jnp.maximum(last + size, 0), size), in_band)
        return ((start, stop),) if in_band == count else ((start, stop), (in_band, count))

    def query_blocks(self, block: Any, count: int) -> tuple[Any, Any]:
        """Return the range of query blocks, of `count`, that see a block of keys."""
        lowest, highest = self.band
        first, size = block * self.key_block, self.query_block
        start: Any = 0 if highest is None else jax.lax.div(jnp.maximum(first - highest, 0), size)
        stop: Any = count
        if lowest is not None:
            last = first + self.key_block - 1 - lowest
            stop = jnp.minimum(jax.lax.div(jnp.maximum(last + size, 0), size), count)
        if self.always_from is None:
            return start, stop
        is_in_band = first < self.always_from
        return jnp.where(is_in_band, start, 0), jnp.where(is_in_band, stop, count)


def attention_with_dropout(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    form: KernelMask | None,
    scalars: jax.Array,
    *,
    heads: int,
    scale: float,
    rate: float,
    target: str,
) -> jax.Array:
    """Compute `dot_product_attention` with dropout on the weights.

    Args:
      query: (B, T, H, K).
      key: (B, S, G, K).
      value: (B, S, G, K).
      form: The mask, or None.
      scalars: (4,) uint32: the words of the dropout key, and the indices of the first row and the first head in
        the arrays of all devices.
      heads: Number of heads of all devices.
      scale: Factor of the logits.
      rate: Dropout rate.
      target: "gpu" (Triton), "tpu" (Mosaic), or "interpret" on any device, for tests.

    Returns:
      (B, T, H, K) in the query's dtype; zeros for a query that sees no key.
    """
    (B, T, H, K), S = query.shape, key.shape[1]
    form = KernelMask(Visibility(()), None, None) if form is None else form
    block = _BLOCKS.get(target, 16)
    sizes = [-(-length // block) * block for length in (T, S)]
    # Triton's blocks have powers of two as sizes.
    width = 1 << max(4, (K - 1).bit_length()) if target == "gpu" else K
    if key.shape[2] != H:
        key, value = (jnp.repeat(x, H // key.shape[2], axis=2) for x in (key, value))
    query, key, value = (
        jnp.pad(jnp.swapaxes(x, 1, 2), [(0, 0), (0, 0), (0, length - x.shape[1]), (0, width - K)])
        for x, length in ((query, sizes[0]), (key, sizes[1]), (value, sizes[1]))
    )
    query_segments, key_segments = (
        jnp.pad(
            jnp.zeros((B, n), jnp.int32) if x is None else jnp.broadcast_to(x.astype(jnp.int32), (B, n)),
            [(0, 0), (0, length - n)],
            constant_values=padding,
        )
        for x, n, length, padding in (
            (form.query_segments, T, sizes[0], _PADDED_QUERY),
            (form.key_segments, S, sizes[1], _PADDED_KEY),
        )
    )
    always = form.always
    assert not always or sizes[1] == S, "always visible keys are the last ones"
    if target == "tpu":
        is_wide = K * query.dtype.itemsize > 512
        maximum = _MAX_TPU_BLOCK_OF_WIDE if is_wide else _MAX_TPU_BLOCK
        query_block, key_block = (
            next(n for n in (maximum, 256, block) if length % n == 0)
            for length in (sizes[0], math.gcd(sizes[1], always))
        )
    else:
        query_block = key_block = block
    key_indices = jnp.broadcast_to(jnp.arange(S), (B, S)) if form.key_indices is None else form.key_indices
    key_indices = jnp.pad(key_indices.astype(jnp.int32), [(0, 0), (0, sizes[1] - S)])
    config = _KernelConfig(
        (heads, *(form.lengths or (T, S))), form.band, S - always if always else None, form.blocks, scale, rate,
        query_block, key_block, target,
    )  # fmt: skip
    key_labels = jnp.stack([key_segments, key_indices], axis=1)
    output = _attend(config, scalars, query, key, value, query_segments[:, :, None], key_labels)
    return jnp.swapaxes(output[:, :, :T, :K], 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: _KernelConfig, *inputs: jax.Array) -> jax.Array:
    return _forward(config, *inputs)[0]


def _forward(config, scalars, query, key, value, query_segments, key_labels):
    """Return (output (B, H, T, K), logarithm of each query's denominator (B, H, T, 1)).

    `key_labels` (B, 2, S) are the segment of each key and its index in the complete sequence.
    """
    outputs = (query, jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32))
    return _call(
        _forward_kernel, "attention_with_dropout_fwd", config, "query", (scalars, query, key, value),
        (query_segments, key_labels), outputs=outputs,
    )  # fmt: skip


def _attend_forward(config, scalars, query, key, value, query_segments, key_labels):
    output, log_denominator = _forward(config, scalars, query, key, value, query_segments, key_labels)
    output, log_denominator = (named(x, KERNEL_RESULTS) for x in (output, log_denominator))
    return output, (scalars, query, key, value, query_segments, key_labels, output, log_denominator)


def _attend_backward(config, residuals, gradient):
    scalars, query, key, value, query_segments, key_labels, output, log_denominator = residuals
    # The sum over keys of a weight times its gradient (Dao et al. 2022, appendix B.4).
    delta = (gradient.astype(jnp.float32) * output.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    inputs = (scalars, query, key, value, gradient, log_denominator, delta)
    segments = (query_segments, key_labels)
    query_gradient, = _call(
        _query_gradient_kernel, "attention_with_dropout_dq", config, "query", inputs, segments, outputs=(query,)
    )  # fmt: skip
    key_gradient, value_gradient = _call(
        _key_gradient_kernel,
        "attention_with_dropout_dkv",
        config,
        "key",
        inputs,
        segments,
        outputs=(key, value),
    )
    return None, query_gradient, key_gradient, value_gradient, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _call(kernel, name, config, split, inputs, segments, *, outputs):
    """Run a kernel once for each row, head and block of the queries or keys, as `split` says.

    A program reads the block of the split axis and all of the other.
    """
    # Imported here, because Pallas takes a second to import and a CPU does not need it.
    from jax.experimental import pallas as pl

    _, query, key, *rest = inputs
    B, H, T, _ = query.shape
    S = key.shape[2]
    size = config.query_block if split == "query" else config.key_block
    count = (T if split == "query" else S) // size

    def spec(x, axis):
        is_split = axis == split
        shape = (None, None, size if is_split else x.shape[2], x.shape[3])
        return pl.BlockSpec(shape, lambda b, h, i: (b, h, i if is_split else 0, 0))

    def segment_spec(axis):
        is_split, length = axis == split, T if axis == "query" else S
        block = size if is_split else length
        if axis == "query":
            return pl.BlockSpec((None, block, 1), lambda b, h, i: (b, i if is_split else 0, 0))
        return pl.BlockSpec((None, 2, block), lambda b, h, i: (b, 0, i if is_split else 0))

    axes = ("query", "key", "key", "query", "query", "query")[: len(inputs) - 1]
    in_specs = [_scalars(pl, config.target), *map(spec, (query, key, *rest), axes)]
    in_specs += [segment_spec("query"), segment_spec("key")]
    return pl.pallas_call(
        functools.partial(kernel, config, pl),
        grid=(B, H, count),
        in_specs=in_specs,
        out_specs=tuple(spec(x, split) for x in outputs),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        name=name,
        interpret=config.target == "interpret",
        **_options(config.target),
    )(*inputs, *segments)


def _scalars(pl, target: str):
    """Return the block of the scalars, which a TPU reads from its scalar memory."""
    if target != "tpu":
        return pl.BlockSpec((4,), lambda b, h, i: (0,))
    from jax.experimental.pallas import tpu as pltpu

    return pl.BlockSpec(memory_space=pltpu.SMEM)


def _options(target: str) -> dict[str, Any]:
    if target == "gpu":
        from jax.experimental.pallas import triton

        return dict(compiler_params=triton.CompilerParams(num_warps=4, num_stages=2))
    if target == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        return dict(compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3))
    return {}


def _product(a, b, contracted: tuple[int, int]):
    """Multiply two blocks, contracting one axis of each, with float32 sums."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


class _Block(NamedTuple):
    """Logits and masks of one block of queries and keys, all (t, s).

    Attributes:
      logits: Scaled logits, the lowest number at masked pairs.
      visible: Whether a query sees a key.
      kept: Whether dropout keeps the weight.
    """

    logits: Any
    visible: Any
    kept: Any


class _Dropout(NamedTuple):
    """Position of a program's weights in the complete array.

    Attributes:
      words: Random words of the dropout key.
      row: Index of the row over all devices.
      head: Index of the head over all devices.
      first_query: Index of the first query.
      query_step: Difference between the indices of two queries in a row.
    """

    words: tuple[Any, Any]
    row: Any
    head: Any
    first_query: Any
    query_step: int


def _dropout_of(config, pl, scalars) -> _Dropout:
    """Return the dropout of this program; called outside loops, where `program_id` is undefined."""
    row, head = (scalars[2 + axis].astype(jnp.int32) + pl.program_id(axis) for axis in (0, 1))
    words, blocks = (scalars[0], scalars[1]), config.blocks
    if blocks is None:
        return _Dropout(words, row, head, 0, 1)
    first_query = blocks.first_query(jax.lax.rem(row, blocks.block_count))
    return _Dropout(words, jax.lax.div(row, blocks.block_count), head, first_query, blocks.dilation)


def _block_of(
    config, dropout: _Dropout, query, key, query_segments, key_labels, query_index, key_index
) -> _Block:
    """Compute a block from queries (t, K), keys (s, K), their labels and the indices of their blocks."""
    shape = (config.query_block, config.key_block)
    queries = query_index * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    keys = key_index * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    key_segments, key_indices = key_labels
    visible = query_segments == key_segments
    lowest, highest = config.band
    has_no_band = False if config.always_from is None else keys >= config.always_from
    if lowest is not None:
        visible = visible & ((keys - queries >= lowest) | has_no_band)
    if highest is not None:
        visible = visible & ((keys - queries <= highest) | has_no_band)
    logits = _product(query, key, (1, 1)) * config.scale
    query_indices = dropout.first_query + queries * dropout.query_step
    indices = flat_indices((dropout.row, dropout.head, query_indices, key_indices), (1, *config.shape))
    kept = keep_mask(dropout.words, indices, config.rate)
    return _Block(jnp.where(visible, logits, _LOWEST), visible, kept)


def _labels(key_labels, keys) -> tuple[Any, Any]:
    """Return (segments, indices in the complete sequence) (1, s) of a slice of keys."""
    return key_labels[0:1, keys], key_labels[1:2, keys]


def _forward_kernel(
    config, pl, scalars, query, key, value, query_segments, key_labels, output, log_denominator
):
    query_index, size = pl.program_id(2), config.key_block
    dropout = _dropout_of(config, pl, scalars)
    queries, segments = query[...], query_segments[...]

    def add_keys(key_index, state):
        maximum, denominator, numerator = state
        keys = pl.ds(pl.multiple_of(key_index * size, size), size)
        block = _block_of(
            config, dropout, queries, key[keys, :], segments, _labels(key_labels, keys), query_index, key_index
        )
        new_maximum = jnp.maximum(maximum, block.logits.max(axis=1, keepdims=True))
        weights = jnp.where(block.visible, jnp.exp(block.logits - new_maximum), 0.0)
        rescale = jnp.exp(maximum - new_maximum)
        kept_weights = jnp.where(block.kept, weights, 0.0).astype(value.dtype)
        numerator = rescale * numerator + _product(kept_weights, value[keys, :], (1, 0))
        return new_maximum, rescale * denominator + weights.sum(axis=1, keepdims=True), numerator

    shape = (config.query_block, 1)
    state = jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros(query.shape, jnp.float32)
    for first, last in config.key_blocks(query_index, key.shape[0] // size):
        state = jax.lax.fori_loop(first, last, add_keys, state)
    maximum, denominator, numerator = state
    denominator = jnp.where(denominator == 0.0, 1.0, denominator)
    output[...] = (numerator / (denominator * (1.0 - config.rate))).astype(output.dtype)
    log_denominator[...] = maximum + jnp.log(denominator)


def _weights_and_gradients(config, block, gradients, values, log_denominator, delta):
    """Return (weights after dropout, gradients of the logits), both (t, s) float32."""
    weights = jnp.where(block.visible, jnp.exp(block.logits - log_denominator), 0.0)
    keep = jnp.where(block.kept, 1.0 / (1.0 - config.rate), 0.0)
    weight_gradients = _product(gradients, values, (1, 1)) * keep
    return weights * keep, weights * (weight_gradients - delta) * config.scale


def _query_gradient_kernel(
    config, pl, scalars, query, key, value, gradient, log_denominator, delta, query_segments, key_labels,
    query_gradient,
):  # fmt: skip
    query_index, size = pl.program_id(2), config.key_block
    dropout = _dropout_of(config, pl, scalars)
    queries, segments, gradients = query[...], query_segments[...], gradient[...]
    log_denominators, deltas = log_denominator[...], delta[...]

    def add_keys(key_index, gradient_sum):
        indices = pl.ds(pl.multiple_of(key_index * size, size), size)
        keys = key[indices, :]
        block = _block_of(
            config, dropout, queries, keys, segments, _labels(key_labels, indices), query_index, key_index
        )
        _, logit_gradients = _weights_and_gradients(
            config, block, gradients, value[indices, :], log_denominators, deltas
        )
        return gradient_sum + _product(logit_gradients.astype(keys.dtype), keys, (1, 0))

    gradient_sum = jnp.zeros(query.shape, jnp.float32)
    for first, last in config.key_blocks(query_index, key.shape[0] // size):
        gradient_sum = jax.lax.fori_loop(first, last, add_keys, gradient_sum)
    query_gradient[...] = gradient_sum.astype(query_gradient.dtype)


def _key_gradient_kernel(
    config, pl, scalars, query, key, value, gradient, log_denominator, delta, query_segments, key_labels,
    key_gradient, value_gradient,
):  # fmt: skip
    key_index, size = pl.program_id(2), config.query_block
    dropout = _dropout_of(config, pl, scalars)
    keys, values, labels = key[...], value[...], _labels(key_labels, slice(None))

    def add_queries(query_index, sums):
        key_sum, value_sum = sums
        indices = pl.ds(pl.multiple_of(query_index * size, size), size)
        queries, gradients = query[indices, :], gradient[indices, :]
        block = _block_of(
            config, dropout, queries, keys, query_segments[indices, :], labels, query_index, key_index
        )
        weights, logit_gradients = _weights_and_gradients(
            config, block, gradients, values, log_denominator[indices, :], delta[indices, :]
        )
        key_sum += _product(logit_gradients.astype(queries.dtype), queries, (0, 0))
        return key_sum, value_sum + _product(weights.astype(gradients.dtype), gradients, (0, 0))

    first, last = config.query_blocks(key_index, query.shape[0] // size)
    zeros = jnp.zeros(key.shape, jnp.float32)
    key_sum, value_sum = jax.lax.fori_loop(first, last, add_queries, (zeros, zeros))
    key_gradient[...] = key_sum.astype(key_gradient.dtype)
    value_gradient[...] = value_sum.astype(value_gradient.dtype)
