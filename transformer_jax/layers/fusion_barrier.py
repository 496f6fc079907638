"""The fusion barrier: an identity that XLA's CPU backend does not fuse across.

It is a primitive of its own, since no combination of JAX's functions has all that it needs: derivatives in
forward and reverse mode, a barrier at the cotangent where there is none at the value, and no trace in what
other platforms compile. Two parameters say where it stands: `forward`, at the value; `backward`, at the
cotangent.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _behind_a_branch(x: jax.Array) -> jax.Array:
    # An optimization barrier is gone before XLA's CPU backend fuses; a branch on a value that is known
    # only at run time is still there. The value is a bit pattern that arithmetic never makes: a NaN
    # with a payload of our own.
    if x.size == 0:
        return x
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    never = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) == jnp.int32(0x7FABCDEF)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


def _computed(x: jax.Array, *, forward: bool, backward: bool) -> jax.Array:
    return _behind_a_branch(x) if forward else x


def _transposed(gradient, x, *, forward: bool, backward: bool):
    # The cotangent of this cotangent passes where the value passed.
    return [
        gradient if type(gradient) is ad.Zero else _barrier.bind(gradient, forward=backward, backward=forward)
    ]


_barrier = Primitive("fusion_barrier")
_barrier.def_impl(lambda x, **_: jnp.asarray(x))  # one operation alone is never fused
_barrier.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_barrier, _transposed)  # the tangent passes a barrier as the value does
batching.defvectorized(_barrier)  # one branch for the complete batch
mlir.register_lowering(_barrier, lambda context, x, **_: [x])
mlir.register_lowering(_barrier, mlir.lower_fun(_computed, multiple_results=False), platform="cpu")


def materialised(x: jax.Array) -> jax.Array:
    """Returns x itself, computed once and stored, on a CPU; its tangent and its cotangent likewise.

    XLA's CPU backend fuses the whole chain of elementwise work behind a matrix product (residual sums,
    normalisations, activations, and in the backward pass their gradients through all layers) into each
    transposing copy in front of another product, and computes it anew in each. Such a fusion of 85
    inputs took 20 ms where the copy takes 0.2. Fusion barriers at the products' inputs brought a training step
    of the tiny Transformer from 0.59 s to 0.39 s. Elsewhere this does nothing.

    Args:
      x: an array of any shape.

    Returns:
      An array like `x`.
    """
    return _barrier.bind(x, forward=True, backward=True)


def with_materialised_cotangent(x: jax.Array) -> jax.Array:
    """Returns x itself, whose cotangent is stored before it is used, on a CPU: `materialised` of it alone."""
    return _barrier.bind(x, forward=False, backward=True)
