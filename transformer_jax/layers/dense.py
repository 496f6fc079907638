"""The matrix product of dense layers, in a form that XLA compiles well on each platform."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.fusion_barrier import materialize, materialize_cotangent

# Maximum rows of a decoding step, in which barriers cost more than the recomputation that they prevent.
_MAX_DECODING_ROWS = 8
# Rows that a single row is padded to on a GPU.
_PADDED_GPU_ROWS = 8


def dense_dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
) -> jax.Array:
    """Compute `lax.dot_general` for Flax's dense layers, with fusion barriers; see `materialize`."""
    del out_sharding  # Flax always passes it; shardings follow from the parameters
    (contracted, _), _ = dimension_numbers
    rows = math.prod(size for axis, size in enumerate(x.shape) if axis not in contracted)
    if rows == 1 and 0 not in contracted and platform() == "gpu":
        # XLA turns the product of one row into a multiplication and a sum, and stores all terms between them.
        padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, _PADDED_GPU_ROWS - 1, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        product = lax.dot_general(
            padded,
            kernel,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        return lax.slice_in_dim(product, 0, 1, axis=0)
    if rows <= _MAX_DECODING_ROWS:
        return lax.dot_general(
            x, kernel, dimension_numbers, precision=precision, preferred_element_type=preferred_element_type
        )
    return materialize_cotangent(
        lax.dot_general(
            materialize(x),
            kernel,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    )
