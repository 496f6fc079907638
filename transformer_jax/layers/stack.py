"""A stack of equal blocks: one block whose leaves carry a leading `layers` axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.named_points import BLOCK_INPUT, EMBEDDING, named
from transformer_jax.layers.remat import rematerialised


def make_stack(make_block: Callable[[jax.Array], Any], key: jax.Array, layers: int) -> Any:
    """`layers` blocks as one pytree of stacked leaves, each initialised from its own key."""
    return jax.vmap(make_block)(jax.random.split(key, layers))


def stack_size(blocks: Any) -> int:
    """The number of layers L of a stack."""
    return jax.tree.leaves(blocks)[0].shape[0]


def unstack(blocks: Any) -> tuple[Any, ...]:
    """The blocks of a stack one by one; a tuple of blocks stays what it is.

    Decoding does this once, before its loop: one-token steps are bound by reading the weights, and
    slicing them out of the stack in every step reads them twice.
    """
    if isinstance(blocks, tuple):
        return blocks
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(stack_size(blocks)))


def _cast_in_turn(block: Any, one: jax.Array, dtype: jnp.dtype) -> Any:
    """The block, with those of its matrices that are not of `dtype` multiplied by `one`.

    Each layer's weights are to be cast in its turn: all at once are a second copy of the model. The compilers
    of accelerators take a cast of the stack out of the loop over its layers, a TPU's even past an optimization
    barrier, but not behind a product with a number that they do not know. The loop carries `one`, which is 1,
    through a barrier in each step; the product is part of the cast, and weights are still gathered after it.
    What is not cast has a barrier alone.
    """
    one = jax.lax.stop_gradient(one)

    def of_leaf(leaf):
        cast = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype and leaf.ndim > 1
        return leaf * one.astype(leaf.dtype) if cast else jax.lax.optimization_barrier(leaf)

    return jax.tree.map(of_leaf, block)


def run_stack(
    block_function: Callable[..., tuple[jax.Array, Any]],
    blocks: Any,
    x: jax.Array,
    dropout_key: jax.Array | None,
    compute: ComputeOptions,
    *,
    by_layer: Any = None,
) -> tuple[jax.Array, Any]:
    """Runs x through the blocks in order.

    Args:
      block_function: `(block, x, dropout_key or None) -> (x, what to keep)`; with `by_layer` it gets the part
        of its layer as a fourth argument.
      blocks: a stack made by `make_stack`, or what `unstack` made of it.
      x: (B, T, D).
      dropout_key: split over the layers, or None.
      compute: unrolling and rematerialisation.
      by_layer: arrays (L, ...) that each layer gets a row of, or None.

    Returns:
      x after the last block, and what each block kept, stacked on a leading axis of L.
    """
    layers = len(blocks) if isinstance(blocks, tuple | list) else stack_size(blocks)
    keys = None if dropout_key is None else jax.random.split(dropout_key, layers)
    on_cpu = platform() == "cpu"

    def from_input(block, x, one, key, own):
        if one is not None:
            block = _cast_in_turn(block, one, x.dtype)
        elif not on_cpu:  # blocks one by one: their casts are to wait for their turn as well
            block = jax.lax.optimization_barrier(block)
        x = named(x, BLOCK_INPUT)
        return block_function(block, x, key) if own is None else block_function(block, x, key, own)

    function = rematerialised(from_input, compute.recomputed)

    def step(carry, layer):
        (x, one), (block, key, own) = carry, layer
        x, kept = function(block, x, one, key, own)
        return (x, None if one is None else jax.lax.optimization_barrier(one)), kept

    if isinstance(blocks, tuple | list):
        kept = []
        x = named(x, EMBEDDING)
        for number, block in enumerate(blocks):
            of_layer = jax.tree.map(lambda values, n=number: values[n], by_layer)
            x, own = function(block, x, None, None if keys is None else keys[number], of_layer)
            kept.append(own)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *kept)

    begin = named(x, EMBEDDING), None if on_cpu else jnp.ones((), jnp.float32)
    (x, _), kept = jax.lax.scan(step, begin, (blocks, keys, by_layer), unroll=compute.unroll_of(layers))
    return x, kept
