"""Exact attention in memory that grows linearly with the length: chunks of keys and one running softmax.

The weights of a query are never held together. While chunks of keys are read, each query keeps its running
maximum, the sum of its exponentials and the sum of its weighted values (Milakov & Gimelshein 2018; Rabe &
Staats 2021). The backward pass needs the output and one number per query, the logarithm of the softmax's
denominator, from which the weights of each chunk are recomputed (Dao et al. 2022, section 3.1 and appendix
B.2).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.running_softmax import RunningSoftmax, masked_logits, weighted_values
from transformer_jax.layers.attention.visibility import Visibility, take
from transformer_jax.layers.custom_transpose import in_one_piece, with_transpose
from transformer_jax.layers.dropout import flat_indices, keep_mask, random_words
from transformer_jax.layers.named_points import KERNEL_RESULTS, named
from transformer_jax.layers.positions.bias import PositionBias

# Sizes of a chunk: its logits are 2 MiB per head, which fits into a core's cache.
QUERIES, KEYS = 512, 1_024


def part_of(
    full: jax.Array | Visibility | PositionBias | None, queries: jax.Array, keys: jax.Array
) -> jax.Array | None:
    """Return the part of a mask or bias (B, H, T, S) for query indices (t,) and key indices (s,).

    An index beyond the end reads the last element.
    """
    if full is None:
        return None
    if isinstance(full, (Visibility, PositionBias)):
        return full.part(queries, keys)
    full = full.reshape((1,) * (4 - full.ndim) + full.shape)
    return take(take(full, queries, 2), keys, 3)


def _chunks(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Split an axis: (..., T, ...) -> (n, ..., size, ...), padded with zeros."""
    length = x.shape[axis]
    count = -(-length // size)
    x = jnp.pad(x, [(0, count * size - length if n == axis else 0) for n in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _join(chunks: jax.Array, length: int, axis: int = 1) -> jax.Array:
    """Invert `_chunks`."""
    x = jnp.moveaxis(chunks, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


class Ring(NamedTuple):
    """The devices that keys and values travel around; a single device is a ring of one.

    Attributes:
      axis: Axis of the mesh inside a `shard_map` over it; None means one device.
      size: Number of devices.
    """

    axis: str | None = None
    size: int = 1

    def device(self) -> jax.Array:
        """Return the index of this device, which is also that of its part of the sequence."""
        return jnp.zeros((), jnp.int32) if self.axis is None else jax.lax.axis_index(self.axis)

    def rotate(self, tree: Any) -> Any:
        """Return the arrays of the previous device."""
        if self.axis is None:
            return tree
        pairs = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)


class _Static(NamedTuple):
    """Settings known at tracing time.

    Attributes:
      queries: Queries per chunk.
      keys: Keys per chunk.
      ring: The ring of devices.
      bias: Tree structure of the bias.
      is_float: For each leaf of the bias, whether it is differentiable.
      rate: Dropout rate on the weights.
    """

    queries: int
    keys: int
    ring: Ring
    bias: Any
    is_float: tuple[bool, ...]
    rate: float


class _Inputs(NamedTuple):
    """The arguments on one device.

    Attributes:
      query: (B, T, G, R, K), scaled.
      key: (B, S, G, K).
      value: (B, S, G, V).
      mask: Mask of the complete sequence.
      floats: Differentiable leaves of the bias of the complete sequence.
      constants: The remaining leaves of the bias.
      words: Random words of dropout, see `dropout.random_words`, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | Visibility | None
    floats: tuple[jax.Array, ...]
    constants: tuple[jax.Array, ...]
    words: jax.Array | None


class _Block(NamedTuple):
    """Mask, bias and dropout of a chunk of queries and a chunk of keys.

    Attributes:
      static: See `_Static`.
      inputs: See `_Inputs`.
      queries: (t,) indices of the queries in the complete sequence.
      keys: (s,) indices of the keys in the complete sequence.
      valid: (s,) False at the padding of the last chunk.
    """

    static: _Static
    inputs: _Inputs
    queries: jax.Array
    keys: jax.Array
    valid: jax.Array

    def mask(self) -> jax.Array:
        """Return the mask, broadcastable to (B, H, t, s)."""
        valid = self.valid[None, None, None]
        mask = part_of(self.inputs.mask, self.queries, self.keys)
        return valid if mask is None else valid & mask

    def bias(self, floats: tuple[jax.Array, ...]) -> jax.Array | None:
        """Return the bias with these differentiable leaves, broadcastable to (B, H, t, s)."""
        float_leaves, constants = iter(floats), iter(self.inputs.constants)
        leaves = [next(float_leaves) if is_float else next(constants) for is_float in self.static.is_float]
        return part_of(jax.tree.unflatten(self.static.bias, leaves), self.queries, self.keys)

    def drop(self, weights: jax.Array) -> jax.Array:
        """Apply dropout to weights (B, G, R, t, s); it drops the same pairs as the plain form."""
        if self.inputs.words is None:
            return weights
        B, G, R = weights.shape[:3]
        ring = self.static.ring.size
        shape = B, G * R, self.inputs.query.shape[1] * ring, self.inputs.key.shape[1] * ring
        rows, heads = jnp.arange(B)[:, None, None, None], jnp.arange(G * R)[:, None, None]
        indices = flat_indices((rows, heads, self.queries[:, None], self.keys), shape)
        kept = keep_mask(self.inputs.words, indices, self.static.rate).reshape(weights.shape)
        return jnp.where(kept, weights / (1.0 - self.static.rate), 0.0)

    def weighted_sums(
        self,
        log_denominator: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        floats: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, jax.Array]:
        """Return (P V (B, G, R, t, V), sum of P (B, G, R, t)) for P = exp(logits - log_denominator)."""
        logits, mask = masked_logits(query, key, self.mask(), self.bias(floats))
        weights = jnp.where(mask, jnp.exp(logits - log_denominator[..., None]), 0.0)
        return weighted_values(self.drop(weights), value), weights.sum(axis=-1)


class _Chunks:
    """The chunks of one device's arguments, and the blocks that they form in each turn of the ring.

    Attributes:
      size: Queries per chunk.
      query: (n, B, size, G, R, K) chunks of queries.
      key: (m, B, s, G, K) chunks of keys.
      value: (m, B, s, G, V) chunks of values.
      starts: (n,) index of each chunk's first query in the complete sequence.
      numbers: (m,) number of each chunk of keys.
      key_length: Number of keys on this device.
    """

    def __init__(self, static: _Static, inputs: _Inputs):
        self._static, self._inputs = static, inputs
        self._device = static.ring.device()
        T, self.key_length = inputs.query.shape[1], inputs.key.shape[1]
        self.size = min(static.queries, T)
        self.query = _chunks(inputs.query, self.size)
        self.key, self.value = (
            _chunks(x, min(static.keys, self.key_length)) for x in (inputs.key, inputs.value)
        )
        self.starts = self._device * T + self.size * jnp.arange(len(self.query))
        self.numbers = jnp.arange(len(self.key))

    def block(self, turn: jax.Array, start: jax.Array, number: jax.Array) -> _Block:
        """Return the block of the queries from `start` on and a chunk of the keys held in this turn."""
        source = (self._device - turn) % self._static.ring.size
        chunk_size = self.key.shape[2]
        offsets = number * chunk_size + jnp.arange(chunk_size)
        queries = start + jnp.arange(self.size)
        keys = source * self.key_length + offsets
        return _Block(self._static, self._inputs, queries, keys, offsets < self.key_length)


class _Tangents(NamedTuple):
    """Tangents or cotangents of the differentiable arguments in `_Inputs`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    floats: tuple[jax.Array, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(static: _Static, inputs: _Inputs) -> jax.Array:
    """Return the output (B, T, G, R, V) in the query's dtype."""
    return _forward(static, inputs)[0]


def _forward(static: _Static, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    """Return (output (B, T, G, R, V), logarithm of the softmax's denominator (B, G, R, T))."""
    chunks = _Chunks(static, inputs)
    width = inputs.value.shape[3]

    def run_turn(carry, turn):
        states, keys, values = carry

        def run_queries(chunk):
            state, query, start = chunk

            def run_keys(state, chunk):
                number, key, value = chunk
                block = chunks.block(turn, start, number)
                mask = block.mask()
                # A chunk of keys that no query of this chunk sees costs nothing.
                return jax.lax.cond(
                    mask.any(),
                    lambda: state.add_keys(query, key, value, mask, block.bias(inputs.floats), block.drop),
                    lambda: state,
                ), None

            return jax.lax.scan(run_keys, state, (chunks.numbers, keys, values))[0]

        states = jax.lax.map(run_queries, (states, chunks.query, chunks.starts))
        return (states, *static.ring.rotate((keys, values))), None

    states = jax.vmap(lambda chunk: RunningSoftmax.empty(chunk, width))(chunks.query)
    carry = (states, chunks.key, chunks.value)
    (states, _, _), _ = jax.lax.scan(run_turn, carry, jnp.arange(static.ring.size))
    T = inputs.query.shape[1]
    output = _join(jax.vmap(RunningSoftmax.output)(states), T).astype(inputs.query.dtype)
    log_denominator = _join(jax.vmap(RunningSoftmax.log_denominator)(states), T, axis=3)  # (B, G, R, T)
    return output, log_denominator


def _backward(static: _Static, residuals, gradient: jax.Array) -> _Tangents:
    """Return the cotangents of the inputs.

    With weights P = exp(logits - log_denominator), the gradient of the logits is P (dP - sum of P dP), and that
    sum is the output times its gradient. This equals the gradient of P V and of P's sum for a constant
    denominator.
    """
    inputs, output, log_denominator = residuals
    chunks = _Chunks(static, inputs)
    product = jnp.einsum("btgrv,btgrv->bgrt", gradient, output, preferred_element_type=jnp.float32)
    gradient = jnp.moveaxis(gradient, 1, 3).astype(jnp.float32)
    gradients = _chunks(gradient, chunks.size, axis=3)  # (n, B, G, R, t, V)
    log_denominators, products = (_chunks(x, chunks.size, axis=3) for x in (log_denominator, product))

    def run_turn(carry, turn):
        (keys, values, d_keys, d_values), d_query, d_floats = carry

        def run_queries(carry, chunk):
            d_keys, d_values, d_floats = carry
            query, gradient, log_denominator, product, start, d_query = chunk

            def run_keys(carry, chunk):
                number, key, value, d_key, d_value = chunk
                block = chunks.block(turn, start, number)
                sums = (carry[0], d_key, d_value, carry[1])

                def add_block():
                    weighted_sums = functools.partial(block.weighted_sums, log_denominator)
                    _, pull_back = jax.vjp(weighted_sums, query, key, value, inputs.floats)
                    terms = pull_back((gradient, -product))
                    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, terms)

                d_query, d_key, d_value, d_floats = jax.lax.cond(block.mask().any(), add_block, lambda: sums)
                return (d_query, d_floats), (d_key, d_value)

            (d_query, d_floats), (d_keys, d_values) = jax.lax.scan(
                run_keys, (d_query, d_floats), (chunks.numbers, keys, values, d_keys, d_values)
            )
            return (d_keys, d_values, d_floats), d_query

        (d_keys, d_values, d_floats), d_query = jax.lax.scan(
            run_queries,
            (d_keys, d_values, d_floats),
            (chunks.query, gradients, log_denominators, products, chunks.starts, d_query),
        )
        # The gradients travel with their keys and are back on their device after the last turn.
        return (static.ring.rotate((keys, values, d_keys, d_values)), d_query, d_floats), None

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.float32)

    carry = (
        (chunks.key, chunks.value, zeros(chunks.key), zeros(chunks.value)),
        zeros(chunks.query),
        jax.tree.map(zeros, inputs.floats),
    )
    ((_, _, d_key, d_value), d_query, d_floats), _ = jax.lax.scan(run_turn, carry, jnp.arange(static.ring.size))
    return _Tangents(
        _join(d_query, inputs.query.shape[1]).astype(inputs.query.dtype),
        _join(d_key, chunks.key_length).astype(inputs.key.dtype),
        _join(d_value, chunks.key_length).astype(inputs.value.dtype),
        tuple(x.astype(like.dtype) for x, like in zip(d_floats, inputs.floats, strict=True)),
    )


def _tangent(static: _Static, residuals, tangents: _Tangents) -> jax.Array:
    """Return the tangent of the output (B, T, G, R, V), the transpose of `_backward`.

    With weights P as there, it is the tangent of P V minus the output times the tangent of P's sum, for a
    constant denominator.
    """
    inputs, output, log_denominator = residuals
    chunks = _Chunks(static, inputs)
    T = inputs.query.shape[1]
    query_tangents = _chunks(tangents.query, chunks.size)
    log_denominators = _chunks(log_denominator, chunks.size, axis=3)

    def run_turn(carry, turn):
        sums, moving = carry

        def run_queries(chunk):
            sums, query, d_query, log_denominator, start = chunk

            def run_keys(sums, chunk):
                number, key, value, d_key, d_value = chunk
                block = chunks.block(turn, start, number)

                def add_block():
                    weighted_sums = functools.partial(block.weighted_sums, log_denominator)
                    primals = query, key, value, inputs.floats
                    _, terms = jax.jvp(weighted_sums, primals, (d_query, d_key, d_value, tangents.floats))
                    return jax.tree.map(jnp.add, sums, terms)

                return jax.lax.cond(block.mask().any(), add_block, lambda: sums), None

            return jax.lax.scan(run_keys, sums, (chunks.numbers, *moving))[0]

        sums = jax.lax.map(run_queries, (sums, chunks.query, query_tangents, log_denominators, chunks.starts))
        return (sums, static.ring.rotate(moving)), None

    rows = log_denominators.shape  # (n, B, G, R, t)
    sums = jnp.zeros((*rows, inputs.value.shape[3])), jnp.zeros(rows)
    key_chunk = chunks.key.shape[2]
    moving = chunks.key, chunks.value, *(_chunks(x, key_chunk) for x in (tangents.key, tangents.value))
    ((d_mixed, d_total), _), _ = jax.lax.scan(run_turn, (sums, moving), jnp.arange(static.ring.size))
    d_mixed, d_total = (jnp.moveaxis(_join(x, T, axis=3), 3, 1) for x in (d_mixed, d_total))
    return (d_mixed - d_total[..., None] * output).astype(output.dtype)


@_attend.defjvp
def _attend_jvp(
    static: _Static, primals: tuple[_Inputs], tangents: tuple[_Inputs]
) -> tuple[jax.Array, jax.Array]:
    (inputs,), (d_inputs,) = primals, tangents
    # Without a mask, JAX would compute the logits of every pair of chunks before the loops.
    results = in_one_piece(functools.partial(_forward, static), inputs)
    # Named, so that rematerialization keeps these results instead of the products of every pair of chunks.
    output, log_denominator = (named(x, KERNEL_RESULTS) for x in results)
    residuals = inputs, output, log_denominator
    moving = _Tangents(d_inputs.query, d_inputs.key, d_inputs.value, d_inputs.floats)
    tangent, backward = functools.partial(_tangent, static), functools.partial(_backward, static)
    return output, with_transpose(tangent, backward, residuals, moving)


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | Visibility | None = None,
    bias: jax.Array | PositionBias | None = None,
    scale: float,
    weight_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    queries: int = QUERIES,
    keys: int = KEYS,
    ring: Ring = Ring(),  # noqa: B008
) -> jax.Array:
    """Compute `dot_product_attention` with about `queries` x `keys` x B x H numbers of temporary memory.

    It has derivatives of any order in forward and reverse mode; those of first order need no more memory.

    Args:
      query: See `dot_product_attention`.
      key: See `dot_product_attention`.
      value: See `dot_product_attention`.
      mask: See `dot_product_attention`.
      bias: See `dot_product_attention`.
      scale: See `dot_product_attention`.
      weight_dropout: See `dot_product_attention`.
      dropout_key: See `dot_product_attention`.
      queries: Queries per chunk.
      keys: Keys per chunk.
      ring: Devices over which the sequence is sharded; `query`, `key` and `value` are then one device's part,
        mask and bias those of the complete sequence.

    Returns:
      (B, T, H, width) in the query's dtype.
    """
    B, T, H, K = query.shape
    G, width = value.shape[2:]
    query = (query * jnp.asarray(scale, query.dtype)).reshape(B, T, G, H // G, K)
    leaves, structure = jax.tree.flatten(bias)
    is_float = tuple(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves)
    floats, constants = (
        tuple(leaf for leaf, flag in zip(leaves, is_float, strict=True) if flag == selected)
        for selected in (True, False)
    )
    static = _Static(queries, keys, ring, structure, is_float, weight_dropout)
    words = None if dropout_key is None else random_words(dropout_key)
    inputs = _Inputs(query, key, value, mask, floats, constants, words)
    return _attend(static, inputs).reshape(B, T, H, width)
