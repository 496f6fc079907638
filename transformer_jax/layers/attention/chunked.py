"""Exact attention in memory that grows linearly with the length: chunks of keys, one running softmax.

The weights of a query are never held together: its running maximum, the sum of its exponentials and the sum of
its weighted values are kept while chunks of keys pass (Milakov & Gimelshein 2018; Rabe & Staats 2021). For the
backward pass the output is kept and one number a query, the logarithm of its softmax's denominator, from which
each chunk's weights are made again (Dao et al. 2022, section 3.1 and appendix B.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.visibility import Visibility, taken
from transformer_jax.layers.custom_transpose import with_transpose
from transformer_jax.layers.dropout import kept_at, numbers_of, random_words
from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.named_points import KERNEL_RESULTS, named
from transformer_jax.layers.positions.bias import PositionBias

# Queries and keys of a chunk: its logits are then 2 MiB a head, which a core's cache holds.
QUERIES, KEYS = 512, 1_024


class Running(NamedTuple):
    """A softmax under way, of queries (B, G, R, t) in groups of R heads that share keys.

    Attributes:
      highest: (B, G, R, t) the largest logit so far.
      total: (B, G, R, t) sum of exp(logit - highest).
      mixed: (B, G, R, t, V) sum of exp(logit - highest) * value.
    """

    highest: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def empty(cls, query: jax.Array, width: int) -> Running:
        """Before any key, of queries (B, t, G, R, K) and values of this width."""
        B, t, G, R, _ = query.shape
        rows = (B, G, R, t)
        lowest = jnp.full(rows, jnp.finfo(jnp.float32).min)
        return cls(lowest, jnp.zeros(rows), jnp.zeros((*rows, width)))

    def with_keys(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        seen: jax.Array,
        bias: jax.Array | None,
        dropped: Callable[[jax.Array], jax.Array] = lambda weights: weights,
    ) -> Running:
        """Once the keys (B, s, G, K) have passed too; `seen` and `bias` are broadcastable to (B, H, t, s).

        `dropped` is dropout on weights (B, G, R, t, s); the softmax's denominator is that of all.
        """
        logits, seen = _logits(query, key, seen, bias)
        # The result is the same for any number here, so no gradient goes through it.
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest, logits.max(axis=-1)))
        weights = jnp.where(seen, jnp.exp(logits - highest[..., None]), 0.0)
        shrink = jnp.exp(jax.lax.stop_gradient(self.highest) - highest)
        total, mixed = shrink * self.total + weights.sum(axis=-1), shrink[..., None] * self.mixed
        return Running(highest, total, mixed + _mixed(dropped(weights), value))

    def result(self) -> jax.Array:
        """(B, t, G, R, V), zeros where a query has seen nothing."""
        mixed = self.mixed / self._denominator()[..., None]
        return jnp.moveaxis(mixed, 3, 1)

    def logarithm(self) -> jax.Array:
        """(B, G, R, t) log of the sum of exp(logit); the lowest number where a query has seen nothing."""
        return self.highest + jnp.log(self._denominator())

    def _denominator(self) -> jax.Array:
        return jnp.where(self.total == 0.0, 1.0, self.total)


def _logits(
    query: jax.Array, key: jax.Array, seen: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(logits (B, G, R, t, s) float32, lowest where nothing is seen; which are seen, broadcastable to them)."""
    groups = key.shape[2]
    logits = float32_product("btgrk,bsgk->bgrts", query, key)
    if bias is not None:
        logits = logits + _by_group(bias, groups)
    seen = _by_group(seen, groups)
    return jnp.where(seen, logits, jnp.finfo(jnp.float32).min), seen


def _mixed(weights: jax.Array, value: jax.Array) -> jax.Array:
    """(B, G, R, t, s) and (B, s, G, V) -> (B, G, R, t, V) float32."""
    weights = weights.astype(value.dtype)
    return float32_product("bgrts,bsgv->bgrtv", weights, value)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """(B, H, t, s) -> (B, G, R, t, s); one for all heads stays one."""
    b, heads, t, s = x.shape
    return x.reshape(b, groups if heads > 1 else 1, -1, t, s)


def part_of(
    whole: jax.Array | Visibility | PositionBias | None, queries: jax.Array, keys: jax.Array
) -> jax.Array | None:
    """A mask or bias (B, H, T, S) at some queries (t,) and keys (s,); a place beyond the end is the last."""
    if whole is None:
        return None
    if isinstance(whole, (Visibility, PositionBias)):
        return whole.part(queries, keys)
    whole = whole.reshape((1,) * (4 - whole.ndim) + whole.shape)
    return taken(taken(whole, queries, 2), keys, 3)


def _chunks(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """(..., T, ...) -> (n, ..., size, ...) along an axis, filled up with zeros."""
    length = x.shape[axis]
    count = -(-length // size)
    x = jnp.pad(x, [(0, count * size - length if n == axis else 0) for n in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(chunks: jax.Array, length: int, axis: int = 1) -> jax.Array:
    """`_chunks` undone."""
    x = jnp.moveaxis(chunks, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


class Ring(NamedTuple):
    """The devices that keys and values go round; one alone has all of them.

    Attributes:
      axis: of the mesh, inside a `shard_map` over it; None: one device.
      parts: how many devices it has.
    """

    axis: str | None = None
    parts: int = 1

    def own(self) -> jax.Array:
        """The number of this device, and of the part of the sequence that it began with."""
        return jnp.zeros((), jnp.int32) if self.axis is None else jax.lax.axis_index(self.axis)

    def rotated(self, tree: Any) -> Any:
        """What the device before this one held."""
        if self.axis is None:
            return tree
        around = [(place, (place + 1) % self.parts) for place in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, around), tree)


class _Static(NamedTuple):
    """What is known before an attention runs: sizes of chunks, the ring, how the bias is put together."""

    queries: int
    keys: int
    ring: Ring
    bias: Any  # tree structure
    floats: tuple[bool, ...]  # which of its leaves have a gradient
    rate: float  # of dropout on the weights


class _Inputs(NamedTuple):
    """One device's arguments.

    Attributes:
      query: (B, T, G, R, K), times the scale.
      key, value: (B, S, G, K) and (B, S, G, V).
      mask: of the whole sequence; as is the bias.
      floats, others: leaves of the bias.
      words: of dropout, see `dropout.random_words`, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | Visibility | None
    floats: tuple[jax.Array, ...]
    others: tuple[jax.Array, ...]
    words: jax.Array | None


class _Places(NamedTuple):
    """Which pairs of a chunk of queries and one of keys see each other, and their bias."""

    how: _Static
    given: _Inputs
    queries: jax.Array  # (t,) numbers of the queries in the whole sequence
    keys: jax.Array  # (s,)
    real: jax.Array  # (s,) whether the key exists

    def seen(self) -> jax.Array:
        """Broadcastable to (B, H, t, s)."""
        real = self.real[None, None, None]
        own = part_of(self.given.mask, self.queries, self.keys)
        return real if own is None else real & own

    def bias(self, floats: tuple[jax.Array, ...]) -> jax.Array | None:
        """Broadcastable to (B, H, t, s)."""
        some, others = iter(floats), iter(self.given.others)
        leaves = [next(some) if floating else next(others) for floating in self.how.floats]
        return part_of(jax.tree.unflatten(self.how.bias, leaves), self.queries, self.keys)

    def dropped(self, weights: jax.Array) -> jax.Array:
        """Weights (B, G, R, t, s) after dropout, of the same places as in the plain form."""
        if self.given.words is None:
            return weights
        B, G, R = weights.shape[:3]
        parts = self.how.ring.parts
        shape = B, G * R, self.given.query.shape[1] * parts, self.given.key.shape[1] * parts
        numbers = numbers_of(
            (
                jnp.arange(B)[:, None, None, None],
                jnp.arange(G * R)[:, None, None],
                self.queries[:, None],
                self.keys,
            ),
            shape,
        )
        kept = kept_at(self.given.words, numbers, self.how.rate).reshape(weights.shape)
        return jnp.where(kept, weights / (1.0 - self.how.rate), 0.0)

    def softmax_parts(
        self,
        logarithm: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        floats: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, jax.Array]:
        """(P V (B, G, R, t, V), sums of P (B, G, R, t)) of the chunk's weights P = exp(logits - logarithm)."""
        logits, shown = _logits(query, key, self.seen(), self.bias(floats))
        weights = jnp.where(shown, jnp.exp(logits - logarithm[..., None]), 0.0)
        return _mixed(self.dropped(weights), value), weights.sum(axis=-1)


class _Schedule:
    """The chunks of one device's arguments, and the places that a turn of the ring brings together."""

    def __init__(self, how: _Static, given: _Inputs):
        self.how, self.given = how, given
        self.own = how.ring.own()
        T, self.length = given.query.shape[1], given.key.shape[1]
        self.size = min(how.queries, T)
        self.query = _chunks(given.query, self.size)
        self.key, self.value = (_chunks(x, min(how.keys, self.length)) for x in (given.key, given.value))
        self.first = self.own * T + self.size * jnp.arange(len(self.query))
        self.number = jnp.arange(len(self.key))

    def places(self, turn: jax.Array, first: jax.Array, number: jax.Array) -> _Places:
        """Of the queries from `first` on and a chunk of the keys that are here in a turn."""
        part = (self.own - turn) % self.how.ring.parts
        size = self.key.shape[2]
        own = number * size + jnp.arange(size)
        queries = first + jnp.arange(self.size)
        return _Places(self.how, self.given, queries, part * self.length + own, own < self.length)


class _Differentiable(NamedTuple):
    """Tangents or cotangents of those of one device's arguments that have any; see `_Inputs`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    floats: tuple[jax.Array, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(how: _Static, given: _Inputs) -> jax.Array:
    """(B, T, G, R, V) in the query's dtype."""
    return _forward(how, given)[0]


def _forward(how: _Static, given: _Inputs):
    turns = _Schedule(how, given)
    width = given.value.shape[3]

    def turn(carry, number_of_turn):
        running, keys, values = carry

        def of_queries(chunk):
            running, query, first = chunk

            def of_keys(running, chunk):
                number, key, value = chunk
                places = turns.places(number_of_turn, first, number)
                seen = places.seen()
                # A chunk behind the queries, or of another document, costs nothing.
                return jax.lax.cond(
                    seen.any(),
                    lambda: running.with_keys(
                        query, key, value, seen, places.bias(given.floats), places.dropped
                    ),
                    lambda: running,
                ), None

            return jax.lax.scan(of_keys, running, (turns.number, keys, values))[0]

        running = jax.lax.map(of_queries, (running, turns.query, turns.first))
        return (running, *how.ring.rotated((keys, values))), None

    running = jax.vmap(lambda chunk: Running.empty(chunk, width))(turns.query)
    carry = (running, turns.key, turns.value)
    (running, _, _), _ = jax.lax.scan(turn, carry, jnp.arange(how.ring.parts))
    T = given.query.shape[1]
    mixed = _joined(jax.vmap(Running.result)(running), T).astype(given.query.dtype)
    logarithm = _joined(jax.vmap(Running.logarithm)(running), T, axis=3)  # (B, G, R, T)
    # Kept by rematerialisation: else it keeps the products of every pair of chunks.
    mixed, logarithm = named(mixed, KERNEL_RESULTS), named(logarithm, KERNEL_RESULTS)
    return mixed, (given, mixed, logarithm)


def _backward(how: _Static, kept, gradient: jax.Array) -> _Differentiable:
    """With weights P = exp(logits - logarithm), the gradient of the logits is P (dP - sum of P dP), and the sum
    is the output times its gradient. So it is that of P V and of P's sum, for a constant logarithm."""
    given, mixed, logarithm = kept
    turns = _Schedule(how, given)
    product = jnp.einsum("btgrv,btgrv->bgrt", gradient, mixed, preferred_element_type=jnp.float32)
    gradients = _chunks(
        jnp.moveaxis(gradient, 1, 3).astype(jnp.float32), turns.size, axis=3
    )  # (n, B, G, R, t, V)
    logarithms, products = (_chunks(x, turns.size, axis=3) for x in (logarithm, product))

    def turn(carry, number_of_turn):
        (keys, values, of_keys, of_values), of_query, of_floats = carry

        def at_queries(carry, chunk):
            of_keys, of_values, of_floats = carry
            query, gradient, logarithm, product, first, of_query = chunk

            def at_keys(carry, chunk):
                number, key, value, of_key, of_value = chunk
                places = turns.places(number_of_turn, first, number)
                seen = places.seen()

                def more():
                    parts = functools.partial(places.softmax_parts, logarithm)
                    _, pull = jax.vjp(parts, query, key, value, given.floats)
                    return jax.tree.map(
                        lambda sum_, x: sum_ + x.astype(sum_.dtype), sums, pull((gradient, -product))
                    )

                sums = (carry[0], of_key, of_value, carry[1])
                of_query, of_key, of_value, of_floats = jax.lax.cond(seen.any(), more, lambda: sums)
                return (of_query, of_floats), (of_key, of_value)

            (of_query, of_floats), (of_keys, of_values) = jax.lax.scan(
                at_keys, (of_query, of_floats), (turns.number, keys, values, of_keys, of_values)
            )
            return (of_keys, of_values, of_floats), of_query

        (of_keys, of_values, of_floats), of_query = jax.lax.scan(
            at_queries,
            (of_keys, of_values, of_floats),
            (turns.query, gradients, logarithms, products, turns.first, of_query),
        )
        # The gradients travel with their keys, and are home after the last turn.
        return (how.ring.rotated((keys, values, of_keys, of_values)), of_query, of_floats), None

    def none_yet(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.float32)

    carry = (
        (turns.key, turns.value, none_yet(turns.key), none_yet(turns.value)),
        none_yet(turns.query),
        jax.tree.map(none_yet, given.floats),
    )
    ((_, _, of_key, of_value), of_query, of_floats), _ = jax.lax.scan(turn, carry, jnp.arange(how.ring.parts))
    of_query = _joined(of_query, given.query.shape[1]).astype(given.query.dtype)
    of_key, of_value = (
        _joined(x, turns.length).astype(like.dtype)
        for x, like in ((of_key, given.key), (of_value, given.value))
    )
    of_floats = tuple(x.astype(like.dtype) for x, like in zip(of_floats, given.floats, strict=True))
    return _Differentiable(of_query, of_key, of_value, of_floats)


def _tangent(how: _Static, kept, moving: _Differentiable) -> jax.Array:
    """The transpose of `_backward`: with weights P as there, the tangent of P V less the output times that of
    P's sum, for a constant logarithm. (B, T, G, R, V) in the query's dtype."""
    given, mixed, logarithm = kept
    turns = _Schedule(how, given)
    size, T = turns.key.shape[2], given.query.shape[1]
    queries, logarithms = _chunks(moving.query, turns.size), _chunks(logarithm, turns.size, axis=3)

    def turn(carry, number_of_turn):
        sums, passing = carry

        def of_queries(chunk):
            sums, query, of_query, logarithm, first = chunk

            def of_keys(sums, chunk):
                number, key, value, of_key, of_value = chunk
                places = turns.places(number_of_turn, first, number)

                def more():
                    parts = functools.partial(places.softmax_parts, logarithm)
                    primals = query, key, value, given.floats
                    _, tangents = jax.jvp(parts, primals, (of_query, of_key, of_value, moving.floats))
                    return jax.tree.map(jnp.add, sums, tangents)

                return jax.lax.cond(places.seen().any(), more, lambda: sums), None

            return jax.lax.scan(of_keys, sums, (turns.number, *passing))[0]

        sums = jax.lax.map(of_queries, (sums, turns.query, queries, logarithms, turns.first))
        return (sums, how.ring.rotated(passing)), None

    rows = logarithms.shape  # (n, B, G, R, t)
    sums = jnp.zeros((*rows, given.value.shape[3])), jnp.zeros(rows)
    passing = turns.key, turns.value, *(_chunks(x, size) for x in (moving.key, moving.value))
    ((of_mixed, of_total), _), _ = jax.lax.scan(turn, (sums, passing), jnp.arange(how.ring.parts))
    of_mixed, of_total = _joined(of_mixed, T, axis=3), _joined(of_total, T, axis=3)
    of_mixed, of_total = jnp.moveaxis(of_mixed, 3, 1), jnp.moveaxis(of_total, 3, 1)[..., None]
    return (of_mixed - of_total * mixed).astype(mixed.dtype)


@_attend.defjvp
def _attend_jvp(how: _Static, primals: tuple[_Inputs], tangents: tuple[_Inputs]) -> tuple[jax.Array, jax.Array]:
    (given,), (of_given,) = primals, tangents
    mixed, kept = _forward(how, given)
    moving = _Differentiable(of_given.query, of_given.key, of_given.value, of_given.floats)
    tangent, backward = functools.partial(_tangent, how), functools.partial(_backward, how)
    return mixed, with_transpose(tangent, backward, kept, moving)


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
    """`dot_product_attention` in memory of about `queries` x `keys` x B x H beside its arguments.

    It has derivatives of forward and reverse mode, of any order; the first ones need no more memory than that.

    Args:
      query, key, value, mask, bias, scale, weight_dropout, dropout_key: see `dot_product_attention`.
      queries, keys: sizes of the chunks.
      ring: the devices over which the sequence is cut, where `query`, `key` and `value` are one device's part;
        mask and bias are of the whole sequence.

    Returns:
      (B, T, H, width) in the query's dtype.
    """
    B, T, H, K = query.shape
    G, width = value.shape[2:]
    query = (query * jnp.asarray(scale, query.dtype)).reshape(B, T, G, H // G, K)
    leaves, structure = jax.tree.flatten(bias)
    floats = tuple(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves)
    some = tuple(leaf for leaf, floating in zip(leaves, floats, strict=True) if floating)
    others = tuple(leaf for leaf, floating in zip(leaves, floats, strict=True) if not floating)
    how = _Static(queries, keys, ring, structure, floats, weight_dropout)
    words = None if dropout_key is None else random_words(dropout_key)
    return _attend(how, _Inputs(query, key, value, mask, some, others, words)).reshape(B, T, H, width)
