"""The convolution inside Flax's convolutional layers, whose kernel's gradient suits XLA's CPU backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.layers.custom_transpose import with_transpose

# Images whose patches are held at once: they stay in a core's cache.
_TOGETHER = 8


def conv_general_dilated(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.conv_general_dilated` for Flax's convolutions of stride 1: the same result and derivatives.

    XLA's CPU backend computes the gradient of a kernel as a convolution with few large channels. As products of
    the input's patches and the cotangent it takes half of the time. Other platforms compile JAX's own form.

    Args:
      x: (B, H, W, C).
      kernel: (h, w, C, F).
      window_strides, lhs_dilation, rhs_dilation: 1 in each axis.
      padding: as `lax.conv_general_dilated` takes it.
      dimension_numbers, precision: likewise.
      feature_group_count: 1.
      out_sharding: ignored; shardings come from the parameters here.

    Raises:
      NotImplementedError: strides, dilations or groups.
    """
    del out_sharding
    if {*window_strides, *(lhs_dilation or ()), *(rhs_dilation or ()), feature_group_count} != {1}:
        raise NotImplementedError("convolutions of stride 1, without dilation and groups, are computed here")
    pads = padding
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), padding)
    how = _How(tuple(map(tuple, pads)), dimension_numbers, precision)
    return _convolution(how, x, kernel)


class _How(NamedTuple):
    padding: tuple[tuple[int, int], ...]
    dimension_numbers: Any
    precision: Any


def _computed(how: _How, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), **how._asdict())


_convolution = jax.custom_jvp(_computed, nondiff_argnums=(0,))


@_convolution.defjvp
def _convolution_jvp(how: _How, primals, tangents):
    tangent = with_transpose(
        functools.partial(_tangent, how), functools.partial(_cotangents, how), primals, tangents
    )
    return _convolution(how, *primals), tangent


def _tangent(how: _How, operands, moving):
    (x, kernel), (of_x, of_kernel) = operands, moving
    return _convolution(how, of_x, kernel) + _convolution(how, x, of_kernel)


def _cotangents(how: _How, operands, cotangent: jax.Array):
    x, kernel = operands

    def of_jax(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        (found,) = jax.linear_transpose(lambda kernel: _computed(how, x, kernel), kernel)(cotangent)
        return found

    def of_patches(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return _patch_products(x, cotangent, kernel.shape, how.padding)

    (of_x,) = jax.linear_transpose(lambda x: _computed(how, x, kernel), x)(cotangent)
    return of_x, lax.platform_dependent(x, cotangent, cpu=of_patches, default=of_jax)


def _patch_products(x: jax.Array, cotangent: jax.Array, shape: tuple[int, ...], pads) -> jax.Array:
    """The sum over images and pixels of each patch times its cotangent, of `shape` (h, w, C, F)."""
    high, wide, _, features = shape
    rows, columns = cotangent.shape[1:3]
    together = math.gcd(len(x), _TOGETHER)
    # Every part has images of all devices, if the batch is spread over them.
    x, cotangent = (y.reshape(together, -1, *y.shape[1:]) for y in (x, cotangent))

    def with_part(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        images, own = (lax.dynamic_index_in_dim(y, part, axis=1, keepdims=False) for y in (x, cotangent))
        images = jnp.pad(images, ((0, 0), *pads, (0, 0)))
        shifted = [images[:, i : i + rows, j : j + columns] for i in range(high) for j in range(wide)]
        patches = jnp.concatenate(shifted, axis=-1)
        return total + jnp.einsum("bhwp,bhwf->pf", patches, own, preferred_element_type=total.dtype), None

    total = jnp.zeros((math.prod(shape[:3]), features), jnp.promote_types(x.dtype, jnp.float32))
    total, _ = lax.scan(with_part, total, jnp.arange(x.shape[1]))
    return total.reshape(shape).astype(x.dtype)
