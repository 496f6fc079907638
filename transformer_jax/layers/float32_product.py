"""Products of low-precision arrays with float32 results and low-precision gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from transformer_jax.layers.custom_transpose import with_transpose


def float32_product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute jnp.einsum(spec, x, y), accumulated and returned in float32.

    JAX's transpose multiplies the float32 cotangent with a float32 copy of the other operand, which is up to
    sixteen times as slow on an accelerator. Here the cotangent is first rounded to the operands' dtype, as
    after a product whose result has that dtype.

    Args:
      spec: Equation of two operands, such as "bthk,bshk->bhts".
      x: The first operand.
      y: The second operand, of the same dtype.
    """
    if x.dtype == jnp.float32 or x.dtype != y.dtype:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
    return _product(spec, x, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


@_product.defjvp
def _product_jvp(spec: str, primals, tangents):
    return _product(spec, *primals), with_transpose(
        functools.partial(_tangent, spec), functools.partial(_cotangent, spec), primals, tangents
    )


def _tangent(spec: str, operands, tangents):
    (x, y), (d_x, d_y) = operands, tangents
    return _product(spec, d_x, y) + _product(spec, x, d_y)


def _cotangent(spec: str, operands, cotangent: jax.Array):
    x, y = operands
    cotangent = cotangent.astype(x.dtype)
    (d_x,) = jax.linear_transpose(lambda x: jnp.einsum(spec, x, y), x)(cotangent)
    (d_y,) = jax.linear_transpose(lambda y: jnp.einsum(spec, x, y), y)(cotangent)
    return d_x, d_y
