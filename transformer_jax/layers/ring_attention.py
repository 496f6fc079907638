"""Exact attention of sequences that are cut over devices: keys and values go round (Liu et al. 2023).

Each device keeps the queries of its own part. In turn it lets every part's keys and values pass, as
`chunked_attention` does with chunks, while they travel from device to device in a ring: forward, no device
holds the keys of more than two parts. For the backward pass those of each turn are kept, of all parts in the
end; no weights are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.layers.chunked_attention import KEYS, QUERIES, Running, chunks, over_keys, scaled_in_groups
from transformer_jax.layers.position_bias import PositionBias
from transformer_jax.layers.visibility import Visibility
from transformer_jax.mesh import SEQUENCE


def ring_size(queries: int, keys: int) -> int:
    """The number of parts that the program's mesh cuts so many queries and keys into; 1 where it cuts none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return 1
    size = mesh.shape.get(SEQUENCE, 1)
    return size if queries % size == 0 and keys % size == 0 else 1


def ring_attention(
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
    """`chunked_attention` over the axis `sequence` of the program's mesh, which divides T and S.

    Args and returns: see there.
    """
    B, T, H, _ = query.shape
    S, G, width = value.shape[1:]
    parts = ring_size(T, S)
    query = scaled_in_groups(query, G, scale)
    around = [(place, (place + 1) % parts) for place in range(parts)]
    along = PartitionSpec(None, SEQUENCE)

    # Compiled also where the caller is not: axes that stay automatic need it.
    @jax.jit
    @functools.partial(
        jax.shard_map,
        in_specs=(along, along, along, PartitionSpec(), PartitionSpec()),
        out_specs=along,
        axis_names={SEQUENCE},
        check_vma=False,
    )
    def local(query, key, value, mask, bias):
        own = jax.lax.axis_index(SEQUENCE)
        size, length = min(queries, query.shape[1]), key.shape[1]
        query_chunks = chunks(query, size)
        key_chunks, value_chunks = (chunks(x, min(keys, length)) for x in (key, value))
        first_query = own * query.shape[1] + size * jnp.arange(len(query_chunks))

        def turn(carry, number):
            running, key_chunks, value_chunks = carry

            @jax.checkpoint
            def of_queries(chunk):
                running, query, first = chunk
                part = (own - number) % parts  # whose keys are here by now
                return over_keys(
                    running, query, key_chunks, value_chunks, length, mask, bias, first, part * length
                )

            running = jax.lax.map(of_queries, (running, query_chunks, first_query))
            key_chunks, value_chunks = (
                jax.lax.ppermute(x, SEQUENCE, around) for x in (key_chunks, value_chunks)
            )
            return (running, key_chunks, value_chunks), None

        running = jax.vmap(lambda chunk: Running.empty(chunk, width))(query_chunks)
        (running, _, _), _ = jax.lax.scan(turn, (running, key_chunks, value_chunks), jnp.arange(parts))
        mixed = jax.vmap(Running.result)(running)  # (n, B, t, G, R, V)
        mixed = jnp.moveaxis(mixed, 0, 1).reshape(B, -1, H, width)
        return mixed[:, : query.shape[1]].astype(query.dtype)

    return local(query, key, value, mask, bias)
