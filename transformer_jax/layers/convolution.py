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

# Images whose patches are held at once, so that they stay in a core's cache; with fewer than the least, JAX's
# own form is taken.
_MOST, _LEAST = 8, 4
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
    """`lax.conv_general_dilated` for Flax's convolutions of stride 1: the same result and derivatives.

    XLA's CPU backend computes the gradient of a kernel as a convolution with few large channels. As products of
    the input's patches and the cotangent it is faster. Other platforms compile JAX's own form.

    Args:
      x: (B, H, W, C).
      kernel: (h, w, C, F).
      window_strides, lhs_dilation, rhs_dilation: 1 in each axis.
      padding: as `lax.conv_general_dilated` takes it.
      dimension_numbers: likewise; of NHWC, HWIO and NHWC.
      feature_group_count: 1.
      precision: of the products.
      out_sharding: ignored; shardings come from the parameters here.

    Raises:
      NotImplementedError: strides, dilations, groups, or another layout.
    """
    del out_sharding
    layout = lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
    if layout != lax.conv_dimension_numbers(x.shape, kernel.shape, _LAYOUT if x.ndim == 4 else None):
        raise NotImplementedError("convolutions of images (B, H, W, C) are computed here")
    if {*window_strides, *(lhs_dilation or ()), *(rhs_dilation or ()), feature_group_count} != {1}:
        raise NotImplementedError("convolutions of stride 1, without dilation and groups, are computed here")
    pads = padding
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), padding)
    how = _How(tuple(map(tuple, pads)), layout, precision)
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
        return _patch_products(how, x, cotangent, kernel.shape)

    (of_x,) = jax.linear_transpose(lambda x: _computed(how, x, kernel), x)(cotangent)
    # On a mesh every part's sum would be one over all devices.
    if jax.sharding.get_abstract_mesh().size > 1 or math.gcd(len(x), _MOST) < _LEAST:
        return of_x, of_jax(x, cotangent)
    return of_x, lax.platform_dependent(x, cotangent, cpu=of_patches, default=of_jax)


def _patch_products(how: _How, x: jax.Array, cotangent: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum over images and pixels of each patch times its cotangent, of `shape` (h, w, C, F)."""
    high, wide, _, features = shape
    rows, columns = cotangent.shape[1:3]
    together = math.gcd(len(x), _MOST)
    parts = [y.reshape(-1, together, *y.shape[1:]) for y in (x, cotangent)]

    def with_part(total: jax.Array, part: list[jax.Array]) -> tuple[jax.Array, None]:
        images, own = part
        images = jnp.pad(images, ((0, 0), *how.padding, (0, 0)))
        shifted = [images[:, i : i + rows, j : j + columns] for i in range(high) for j in range(wide)]
        patches = jnp.concatenate(shifted, axis=-1)
        options: dict[str, Any] = dict(precision=how.precision, preferred_element_type=total.dtype)
        return total + jnp.einsum("bhwp,bhwf->pf", patches, own, **options), None

    total = jnp.zeros((math.prod(shape[:3]), features), jnp.promote_types(x.dtype, jnp.float32))
    total, _ = lax.scan(with_part, total, parts)
    return total.reshape(shape).astype(x.dtype)
