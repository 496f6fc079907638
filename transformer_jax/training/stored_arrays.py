"""Arrays as checkpoints hold them: on the host or as shards, with random keys as integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from transformer_jax.parameter_names import named_leaves, nested, with_leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def storable(tree: Any) -> dict[str, Any]:
    """Return the leaves by canonical name, nested, with random keys as integers and without empty nodes."""
    leaves = named_leaves(tree)
    return nested({n: jax.random.key_data(x) if _is_key(x) else x for n, x in leaves.items()})


def restored_like(target: Any, stored: dict[str, Any]) -> Any:
    """Return `target` with the leaves of a stored tree, the inverse of `storable`.

    Args:
      target: A tree of arrays, real or abstract, whose shardings the result has.
      stored: Nested dictionaries of canonical names.
    """
    leaves = named_leaves(stored)
    for name, leaf in named_leaves(target).items():
        if _is_key(leaf) and name in leaves:
            leaves[name] = jax.random.wrap_key_data(jnp.asarray(leaves[name]), impl=jax.random.key_impl(leaf))
    targets = named_leaves(target)

    def put(name: str, leaf: Any) -> jax.Array:
        # A NumPy array from Orbax would be transferred at each call.
        sharding = getattr(targets.get(name), "sharding", None)
        return jnp.asarray(leaf) if sharding is None else jax.device_put(leaf, sharding)

    return with_leaves(target, {name: put(name, leaf) for name, leaf in leaves.items()})


def _is_sharded(leaf: Any) -> bool:
    """Return whether other processes hold shards of an array, real or abstract."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def restore_args_for(leaf: Any) -> ocp.RestoreArgs:
    """Return how Orbax reads an array: as NumPy, or as shards if other processes hold some."""
    if _is_sharded(leaf):
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def local_parts(leaf: jax.Array) -> dict[Any, np.ndarray]:
    """Return this process's parts of an array: the shard of each device, or {None: the full array}."""
    if not _is_sharded(leaf):
        return {None: np.asarray(leaf)}
    return {shard.device: np.asarray(shard.data) for shard in leaf.addressable_shards}


def join_parts(like: Any, parts: dict[Any, np.ndarray]) -> Any:
    """Return an array with the shape, dtype and sharding of `like`, the inverse of `local_parts`."""
    if not _is_sharded(like):
        return parts[None].astype(like.dtype)
    shards = [jax.device_put(part.astype(like.dtype), device) for device, part in parts.items()]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def copy_to_host(tree: Any) -> Any:
    """Return host copies of the arrays, because the next step donates their buffers.

    An array that is sharded over processes stays on its devices. Orbax copies it from an accelerator before
    `save` returns; on a CPU Orbax would read the buffer later, so the buffer is copied here.
    """

    def copy(leaf: Any) -> Any:
        if not _is_sharded(leaf):
            return np.array(leaf)
        device = next(iter(leaf.sharding.device_set))
        return jnp.copy(leaf) if device.platform == "cpu" else leaf

    return jax.tree.map(copy, tree)
