"""A wall that XLA's CPU backend does not fuse across."""

import jax
import jax.numpy as jnp
from jax import lax


def _wall(x: jax.Array) -> jax.Array:
    # An optimization barrier is gone before XLA's CPU backend fuses; a branch on a value that is known
    # only at run time is still there. The value is a bit pattern that arithmetic never makes: a NaN
    # with a payload of our own.
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    never = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) == jnp.int32(0x7FABCDEF)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


def _identity(x: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    return lax.platform_dependent(x, cpu=_wall, default=lambda x: x)


@jax.custom_vjp
def materialised(x: jax.Array) -> jax.Array:
    """x itself, computed once and stored, on a CPU; its gradient likewise.

    XLA's CPU backend fuses the whole chain of elementwise work behind a matrix product (residual sums,
    normalisations, activations, and in the backward pass their gradients through all layers) into each
    transposing copy in front of another product, and computes it anew in each. Such a fusion of 85
    inputs took 20 ms where the copy takes 0.2. Walls at the products' inputs brought a training step of
    the tiny Transformer from 0.59 s to 0.39 s. Elsewhere this does nothing.
    """
    return _identity(x)


materialised.defvjp(lambda x: (_identity(x), None), lambda _, gradient: (_identity(gradient),))
