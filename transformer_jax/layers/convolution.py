"""Convolution for Flax's layers, with a gradient of the kernel that is fast on XLA's CPU backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.layers.custom_transpose import with_transpose

# Maximum number of images whose patches are held at once, so that they fit into a core's cache; for fewer than
# the minimum JAX's gradient is used.
_MAX_IMAGES, _MIN_IMAGES = 8, 4
_LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv_general_dilated(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    *,
    dimension_numbers: Any,
    feature_group_count: int = 1,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Compute `lax.conv_general_dilated` for Flax's convolutions of stride 1, with the same derivatives.

    XLA's CPU backend computes the gradient of a kernel as a convolution with few large channels; products of
    the input's patches and the cotangent are faster. Other platforms use JAX's gradient.

    Args:
      x: (B, H, W, C).
      kernel: (h, w, C, F).
      window_strides: 1 in each axis.
      padding: See `lax.conv_general_dilated`.
      lhs_dilation: 1 in each axis.
      rhs_dilation: 1 in each axis.
      dimension_numbers: Those of NHWC, HWIO and NHWC.
      feature_group_count: 1.
      precision: Precision of the products.
      out_sharding: Ignored; shardings follow from the parameters.

    Raises:
      NotImplementedError: The convolution has strides, dilations, groups, or another layout.
    """
    del out_sharding
    layout = lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
    if layout != lax.conv_dimension_numbers(x.shape, kernel.shape, _LAYOUT if x.ndim == 4 else None):
        raise NotImplementedError("only convolutions of images (B, H, W, C) are supported")
    if {*window_strides, *(lhs_dilation or ()), *(rhs_dilation or ()), feature_group_count} != {1}:
        raise NotImplementedError("only convolutions of stride 1, without dilation and groups, are supported")
    pads = padding
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), padding)
    return _convolution(_Static(tuple(map(tuple, pads)), layout, precision), x, kernel)


class _Static(NamedTuple):
    padding: tuple[tuple[int, int], ...]
    dimension_numbers: Any
    precision: Any


def _convolve(static: _Static, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), **static._asdict())


_convolution = jax.custom_jvp(_convolve, nondiff_argnums=(0,))


@_convolution.defjvp
def _convolution_jvp(static: _Static, primals, tangents):
    tangent = with_transpose(
        functools.partial(_tangent, static), functools.partial(_cotangents, static), primals, tangents
    )
    return _convolution(static, *primals), tangent


def _tangent(static: _Static, operands, tangents):
    (x, kernel), (d_x, d_kernel) = operands, tangents
    return _convolution(static, d_x, kernel) + _convolution(static, x, d_kernel)


def _cotangents(static: _Static, operands, cotangent: jax.Array):
    x, kernel = operands

    def by_jax(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        (d_kernel,) = jax.linear_transpose(lambda kernel: _convolve(static, x, kernel), kernel)(cotangent)
        return d_kernel

    def by_patches(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return _patch_products(static, x, cotangent, kernel.shape)

    (d_x,) = jax.linear_transpose(lambda x: _convolve(static, x, kernel), x)(cotangent)
    # On a mesh the sum of each part would be a sum over all devices.
    if jax.sharding.get_abstract_mesh().size > 1 or math.gcd(len(x), _MAX_IMAGES) < _MIN_IMAGES:
        return d_x, by_jax(x, cotangent)
    return d_x, lax.platform_dependent(x, cotangent, cpu=by_patches, default=by_jax)


def _patch_products(static: _Static, x: jax.Array, cotangent: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the sum over images and pixels of each patch times its cotangent, of `shape` (h, w, C, F)."""
    height, width, _, features = shape
    rows, columns = cotangent.shape[1:3]
    count = math.gcd(len(x), _MAX_IMAGES)
    parts = [y.reshape(-1, count, *y.shape[1:]) for y in (x, cotangent)]

    def add_part(total: jax.Array, part: list[jax.Array]) -> tuple[jax.Array, None]:
        images, cotangents = part
        images = jnp.pad(images, ((0, 0), *static.padding, (0, 0)))
        shifted = [images[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
        patches = jnp.concatenate(shifted, axis=-1)
        options: dict[str, Any] = dict(precision=static.precision, preferred_element_type=total.dtype)
        return total + jnp.einsum("bhwp,bhwf->pf", patches, cotangents, **options), None

    total = jnp.zeros((math.prod(shape[:3]), features), jnp.promote_types(x.dtype, jnp.float32))
    total, _ = lax.scan(add_part, total, parts)
    return total.reshape(shape).astype(x.dtype)
