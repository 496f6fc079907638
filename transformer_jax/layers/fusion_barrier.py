"""Fusion barrier: an identity across which XLA's CPU backend does not fuse.

It is a custom primitive, because JAX's functions do not combine to what it needs: derivatives in forward and
reverse mode, a barrier at the cotangent independent of that at the value, and no trace in the programs of other
platforms. Its parameters are `forward`, a barrier at the value, and `backward`, a barrier at the cotangent.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _branch(x: jax.Array) -> jax.Array:
    # XLA's CPU backend removes optimization barriers before it fuses, but not a branch on a value known only at
    # run time. The branch tests for a NaN with a payload that arithmetic never produces.
    if x.size == 0:
        return x
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    never = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) == jnp.int32(0x7FABCDEF)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


def _compute(x: jax.Array, *, forward: bool, backward: bool) -> jax.Array:
    return _branch(x) if forward else x


def _transpose(gradient, x, *, forward: bool, backward: bool):
    # The cotangent's own cotangent has the barrier of the value.
    return [
        gradient if type(gradient) is ad.Zero else _barrier.bind(gradient, forward=backward, backward=forward)
    ]


_barrier = Primitive("fusion_barrier")
_barrier.def_impl(lambda x, **_: jnp.asarray(x))  # a single operation is never fused
_barrier.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_barrier, _transpose)  # the tangent has the barriers of the value
batching.defvectorized(_barrier)  # one branch for the complete batch
mlir.register_lowering(_barrier, lambda context, x, **_: [x])
mlir.register_lowering(_barrier, mlir.lower_fun(_compute, multiple_results=False), platform="cpu")


def materialize(x: jax.Array) -> jax.Array:
    """Return x; on a CPU, x, its tangent and its cotangent are computed once and stored.

    XLA's CPU backend fuses the complete chain of elementwise operations after a matrix product (residual sums,
    norms, activations, and in the backward pass their gradients through all layers) into each transposing copy
    before another product, and recomputes it in each. Such a fusion of 85 inputs took 20 ms instead of 0.2 for
    the copy. Fusion barriers at the inputs of products shortened a training step of the tiny Transformer from
    0.59 s to 0.39 s. On other platforms this does nothing.

    Args:
      x: An array of any shape.

    Returns:
      An array like `x`.
    """
    return _barrier.bind(x, forward=True, backward=True)


def materialize_cotangent(x: jax.Array) -> jax.Array:
    """Return x; on a CPU its cotangent is stored before it is used, see `materialize`."""
    return _barrier.bind(x, forward=False, backward=True)
