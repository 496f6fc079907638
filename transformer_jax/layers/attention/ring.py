"""Exact attention over sequences that are sharded over devices: ring attention (Liu et al. 2023).

Each device keeps the queries of its part, while the keys and values of all parts travel from device to device
in a ring; each part is processed like the chunks of `chunked_attention`. In the backward pass they travel
again, together with their gradients. No device ever holds the keys of more than two parts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import SEQUENCE
from transformer_jax.layers.attention.chunked import Ring, chunked_attention
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.positions.bias import PositionBias


def ring_size(queries: int, keys: int) -> int:
    """Return the number of devices over which the program's mesh shards so many queries and keys."""
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
    dropout_key: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Compute `chunked_attention` over the axis `sequence` of the program's mesh, which must divide T and S.

    The arguments are those of `chunked_attention`, except `ring`; `options` holds its scalars.

    Returns:
      (B, T, H, width) in the query's dtype.
    """
    ring = Ring(SEQUENCE, ring_size(query.shape[1], key.shape[1]))
    sharded, replicated = PartitionSpec(None, SEQUENCE), PartitionSpec()

    # jit is required even in eager code, because the remaining axes of the mesh stay automatic.
    @jax.jit
    @functools.partial(
        jax.shard_map,
        in_specs=(sharded, sharded, sharded, replicated, replicated, replicated),
        out_specs=sharded,
        axis_names={SEQUENCE},
        check_vma=False,
    )
    def local(query, key, value, mask, bias, dropout_key):
        return chunked_attention(
            query, key, value, mask=mask, bias=bias, dropout_key=dropout_key, ring=ring, **options
        )

    return local(query, key, value, mask, bias, dropout_key)
