"""Exact attention of sequences that are sharded over devices: keys and values go round (Liu et al. 2023).

Each device keeps the queries of its own part. In turn it lets every part's keys and values pass, as
`chunked_attention` does with chunks, while they travel from device to device in a ring. For the backward pass
they go round once more, and their gradients with them: no device ever holds the keys of more than two parts.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import SEQUENCE
from transformer_jax.layers.attention.chunked import KEYS, QUERIES, Ring, chunked_attention
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.positions.bias import PositionBias


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
    weight_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> jax.Array:
    """`chunked_attention` over the axis `sequence` of the program's mesh, which divides T and S.

    Args and returns: see there.
    """
    ring = Ring(SEQUENCE, ring_size(query.shape[1], key.shape[1]))
    along = PartitionSpec(None, SEQUENCE)

    # Compiled also where the caller is not: axes that stay automatic need it.
    @jax.jit
    @functools.partial(
        jax.shard_map,
        in_specs=(along, along, along, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=along,
        axis_names={SEQUENCE},
        check_vma=False,
    )
    def local(query, key, value, mask, bias, dropout_key):
        return chunked_attention(
            query, key, value, mask=mask, bias=bias, scale=scale, weight_dropout=weight_dropout,
            dropout_key=dropout_key, queries=queries, keys=keys, ring=ring,
        )  # fmt: skip

    return local(query, key, value, mask, bias, dropout_key)
