"""Attention within windows over sequences that are sharded over devices, which exchange only borders.

Each device computes the queries of its part. Its windows reach only the last keys of the part before and the
first keys of the part after, which neighbors exchange. Global keys are few and are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import SEQUENCE
from transformer_jax.layers.attention.kernels import axes_of
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.attention.windows import Blocks, Window


def attention_with_borders(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    global_pair: tuple[jax.Array, jax.Array] | None,
    *,
    window: Window,
    mask: Visibility,
    words: jax.Array | None,
    size: int,
    local: Callable[..., jax.Array],
    by_kernel: bool = False,
    **options: Any,
) -> jax.Array:
    """Compute `local_attention` over the axis `sequence` of the program's mesh.

    Args:
      query: See `local_attention`.
      key: See `local_attention`, as many as queries.
      value: See `local_attention`.
      global_pair: See `local_attention`.
      window: See `local_attention`.
      mask: See `local_attention`.
      words: See `local_attention`.
      size: Number of devices of the axis.
      local: `local_attention` or another form of it, for the part of a device.
      by_kernel: `local` calls a kernel, so that no axis of the mesh may stay automatic.
      **options: Other arguments of `local`.

    Raises:
      ValueError: A device's part is shorter than the keys that a window reaches on one side.
    """
    part = query.shape[1] // size
    blocks = Blocks.of(window, part, part)
    before, after = window.dilation * blocks.before, window.dilation * blocks.after
    check_parts(query.shape[1], size, max(before, after))

    def exchange(x: jax.Array) -> jax.Array:
        """Put the last keys of the previous device before x (B, s, ...), and the first of the next after it."""
        parts = [x]
        if before:
            pairs = [(n, n + 1) for n in range(size - 1)]
            parts.insert(0, jax.lax.ppermute(x[:, part - before :], SEQUENCE, pairs))
        if after:
            parts.append(jax.lax.ppermute(x[:, :after], SEQUENCE, [(n + 1, n) for n in range(size - 1)]))
        return jnp.concatenate(parts, axis=1)

    rows, heads = axes_of(query, key) if by_kernel else (None, None)
    B = query.shape[0]

    def specs(tree: Any, *axes: str | None) -> Any:
        """Return the specs of arrays with B rows or one row."""
        return jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == B else None, *axes), tree)

    sharded = PartitionSpec(rows, SEQUENCE, heads)
    arrays = (window.global_queries, window.global_keys)
    inputs = (query, key, value, global_pair, mask, arrays, words)
    in_specs = (
        sharded, sharded, sharded, specs(global_pair, None, heads), specs(mask), specs(arrays),
        jax.tree.map(lambda _: PartitionSpec(), words),
    )  # fmt: skip

    # jit is required even in eager code, because the remaining axes of the mesh may stay automatic.
    @jax.jit
    @functools.partial(
        jax.shard_map, in_specs=in_specs, out_specs=sharded, check_vma=False,
        **({} if by_kernel else {"axis_names": {SEQUENCE}}),
    )  # fmt: skip
    def run(query, key, value, global_pair, mask, arrays, words):
        replicated = window._replace(global_queries=arrays[0], global_keys=arrays[1])
        return local(
            query, exchange(key), exchange(value), global_pair, window=replicated, mask=mask, words=words,
            first=jax.lax.axis_index(SEQUENCE) * part, extended=True, **options,
        )  # fmt: skip

    return run(*inputs)


def check_parts(length: int, size: int, reach: int) -> None:
    """Check that the part of a device holds all keys that a window reaches on one side.

    Raises:
      ValueError: It does not.
    """
    if length // size < reach:
        raise ValueError(
            f"{length} tokens over sequence={size} are {length // size} a device, fewer than the {reach} that "
            "a window reaches on one side: use fewer devices for `sequence`, or longer rows"
        )
