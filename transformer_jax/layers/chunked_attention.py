"""Exact attention in memory that grows linearly with the length: chunks of keys, one running softmax.

The weights of a query are never held together: its running maximum, the sum of its exponentials and the sum of
its weighted values are kept while chunks of keys pass (Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et
al. 2022), and the backward pass makes each chunk's weights again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.position_bias import PositionBias
from transformer_jax.layers.visibility import Visibility, taken

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
    ) -> Running:
        """Once the keys (B, s, G, K) have passed too; `seen` and `bias` are broadcastable to (B, H, t, s)."""
        groups = key.shape[2]
        logits = jnp.einsum("btgrk,bsgk->bgrts", query, key, preferred_element_type=jnp.float32)
        if bias is not None:
            logits = logits + _by_group(bias, groups)
        seen = _by_group(seen, groups)
        logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
        # The result is the same for any number here, so no gradient goes through it.
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest, logits.max(axis=-1)))
        weights = jnp.where(seen, jnp.exp(logits - highest[..., None]), 0.0)
        shrink = jnp.exp(jax.lax.stop_gradient(self.highest) - highest)
        mixed = jnp.einsum(
            "bgrts,bsgv->bgrtv", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
        )
        return Running(
            highest, shrink * self.total + weights.sum(axis=-1), shrink[..., None] * self.mixed + mixed
        )

    def result(self) -> jax.Array:
        """(B, t, G, R, V), zeros where a query has seen nothing."""
        mixed = self.mixed / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]
        return jnp.moveaxis(mixed, 3, 1)


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


def scaled_in_groups(query: jax.Array, groups: int, scale: float) -> jax.Array:
    """Queries (B, T, H, K) times the scale of their logits, as (B, T, G, R, K)."""
    B, T, H, K = query.shape
    return (query * jnp.asarray(scale, query.dtype)).reshape(B, T, groups, H // groups, K)


def chunks(x: jax.Array, size: int) -> jax.Array:
    """(B, T, ...) -> (n, B, size, ...), filled up with zeros."""
    B, T = x.shape[:2]
    count = -(-T // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - T), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)


def over_keys(
    running: Running,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: int,
    mask: jax.Array | Visibility | None,
    bias: jax.Array | PositionBias | None,
    first_query: jax.Array,
    first_key: jax.Array,
) -> Running:
    """What is running once all chunks of keys (n, B, s, G, K) have passed one chunk of queries (B, t, G, R, K).

    The chunks hold `length` keys, of which the first is number `first_key` of all that the mask knows.
    """
    size = keys.shape[2]
    queries = first_query + jnp.arange(query.shape[1])

    def step(running: Running, chunk: tuple[jax.Array, jax.Array, jax.Array]):
        number, key, value = chunk
        places = number * size + jnp.arange(size)
        seen = (places < length)[None, None, None]
        own = part_of(mask, queries, first_key + places)
        if own is not None:
            seen = seen & own
        own_bias = part_of(bias, queries, first_key + places)
        # A chunk behind the queries, or of another document, costs nothing.
        running = jax.lax.cond(
            seen.any(),
            lambda: running.with_keys(query, key, value, seen, own_bias),
            lambda: running,
        )
        return running, None

    return jax.lax.scan(jax.checkpoint(step), running, (jnp.arange(len(keys)), keys, values))[0]


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | Visibility | None = None,
    bias: jax.Array | PositionBias | None = None,
    scale: float,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> jax.Array:
    """`dot_product_attention` in memory of about `queries` x `keys` x B x H beside its arguments.

    Args:
      query, key, value, mask, bias, scale: see `dot_product_attention`.
      queries, keys: sizes of the chunks.

    Returns:
      (B, T, H, width) in the query's dtype.
    """
    B, T, H, _ = query.shape
    G, width = value.shape[2:]
    size = min(queries, T)
    query = scaled_in_groups(query, G, scale)
    length = key.shape[1]
    key_chunks, value_chunks = (chunks(x, min(keys, length)) for x in (key, value))

    @jax.checkpoint
    def of_queries(number_and_query: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, query = number_and_query
        running = over_keys(
            Running.empty(query, width), query, key_chunks, value_chunks, length, mask, bias,
            number * size, jnp.zeros((), jnp.int32),
        )  # fmt: skip
        return running.result().astype(query.dtype)

    query_chunks = chunks(query, size)
    mixed = jax.lax.map(of_queries, (jnp.arange(len(query_chunks)), query_chunks))
    return jnp.moveaxis(mixed, 0, 1).reshape(B, -1, H, width)[:, :T]
