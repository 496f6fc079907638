"""The matrix product inside every dense layer, in the form that suits XLA's CPU backend."""

import math

import jax
from jax import lax

from transformer_jax.layers.fusion_barrier import materialised, with_materialised_cotangent

# So few rows are a step of decoding: what is computed once more is less than the barriers' own cost.
_FEW = 8


def dense_dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
) -> jax.Array:
    """`lax.dot_general` for Flax's dense layers: same result, but see `materialised`."""
    del out_sharding  # Flax always passes it; shardings come from the parameters here.
    (contracted, _), _ = dimension_numbers
    rows = math.prod(size for axis, size in enumerate(x.shape) if axis not in contracted)
    if rows <= _FEW:
        return lax.dot_general(
            x, kernel, dimension_numbers, precision=precision, preferred_element_type=preferred_element_type
        )
    return with_materialised_cotangent(
        lax.dot_general(
            materialised(x),
            kernel,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    )
