"""A stack of equal blocks: one block whose leaves carry a leading `layers` axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.named_points import BLOCK_INPUT, EMBEDDING, named
from transformer_jax.layers.remat import rematerialize


def make_stack(make_block: Callable[[jax.Array], Any], key: jax.Array, layers: int) -> Any:
    """Create `layers` blocks as one pytree of stacked leaves, each initialized from its own key."""
    return jax.vmap(make_block)(jax.random.split(key, layers))


def stack_size(blocks: Any) -> int:
    """Return the number of layers L of a stack."""
    return jax.tree.leaves(blocks)[0].shape[0]


def unstack(blocks: Any) -> tuple[Any, ...]:
    """Split a stack into a tuple of blocks; a tuple is returned unchanged.

    Decoding does this once, before its loop: one-token steps are bound by reading the weights, and slicing the
    stack in every step would read them twice.
    """
    if isinstance(blocks, tuple):
        return blocks
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(stack_size(blocks)))


def _keep_cast_in_loop(block: Any, unit: jax.Array, dtype: jnp.dtype) -> Any:
    """Multiply the matrices of a block that are not of `dtype` by `unit`, a 1 that compilers do not know.

    A layer's weights should be cast inside the loop over the layers, because casting the stack before the loop
    would hold a second copy of the model. The compilers of accelerators move a cast out of the loop, a TPU's
    even past an optimization barrier, but not a cast of a product with an unknown number. The loop carries
    `unit` through a barrier in each step; the product is fused into the cast, and weights are still gathered
    after it. Leaves that are not cast only get a barrier.
    """
    unit = jax.lax.stop_gradient(unit)

    def keep_cast(leaf):
        cast = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype and leaf.ndim > 1
        return leaf * unit.astype(leaf.dtype) if cast else jax.lax.optimization_barrier(leaf)

    return jax.tree.map(keep_cast, block)


def run_stack(
    block_function: Callable[..., tuple[jax.Array, Any]],
    blocks: Any,
    x: jax.Array,
    dropout_key: jax.Array | None,
    compute: ComputeOptions,
    *,
    by_layer: Any = None,
) -> tuple[jax.Array, Any]:
    """Run x through the blocks in order.

    Args:
      block_function: Function `(block, x, dropout_key or None) -> (x, extra)`; with `by_layer`, the layer's
        part is a fourth argument.
      blocks: A stack of `make_stack`, or its blocks from `unstack`.
      x: (B, T, D).
      dropout_key: Random key, split over the layers, or None.
      compute: Unrolling and rematerialization.
      by_layer: Arrays (L, ...) of which each layer gets a row, or None.

    Returns:
      (x after the last block, the blocks' second results stacked on a leading axis of L).
    """
    layers = len(blocks) if isinstance(blocks, tuple | list) else stack_size(blocks)
    keys = None if dropout_key is None else jax.random.split(dropout_key, layers)
    on_cpu = platform() == "cpu"

    def run_block(block, x, unit, key, layer_values):
        if unit is not None:
            block = _keep_cast_in_loop(block, unit, x.dtype)
        elif not on_cpu:  # separate blocks: the barrier keeps each cast next to its block
            block = jax.lax.optimization_barrier(block)
        x = named(x, BLOCK_INPUT)
        extra_arguments = () if layer_values is None else (layer_values,)
        return block_function(block, x, key, *extra_arguments)

    run_block = rematerialize(run_block, compute.recomputed)

    if isinstance(blocks, tuple | list):
        extras = []
        x = named(x, EMBEDDING)
        for number, block in enumerate(blocks):
            layer_values = jax.tree.map(lambda values, n=number: values[n], by_layer)
            x, extra = run_block(block, x, None, None if keys is None else keys[number], layer_values)
            extras.append(extra)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *extras)

    def step(carry, layer):
        (x, unit), (block, key, layer_values) = carry, layer
        x, extra = run_block(block, x, unit, key, layer_values)
        return (x, None if unit is None else jax.lax.optimization_barrier(unit)), extra

    carry = named(x, EMBEDDING), None if on_cpu else jnp.ones((), jnp.float32)
    (x, _), extras = jax.lax.scan(step, carry, (blocks, keys, by_layer), unroll=compute.unroll_of(layers))
    return x, extras
