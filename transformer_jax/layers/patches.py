"""Images to tokens: patches by one projection, or a few convolutions."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.convolution import conv_general_dilated
from transformer_jax.layers.dense import dense_dot_general


def cut_into_patches(images: jax.Array, size: int) -> jax.Array:
    """Square patches, row by row.

    Args:
      images: (B, height, width, channels).
      size: of a patch in pixels; it divides height and width.

    Returns:
      (B, P, size * size * channels), a patch's pixels row by row with their channels.

    Raises:
      ValueError: patches that do not divide the image.
    """
    B, height, width, channels = images.shape
    if height % size or width % size:
        raise ValueError(f"images of {height} x {width} pixels are not divided by patches of {size}")
    x = images.reshape(B, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, size * size * channels)


def joined_patches(patches: jax.Array, size: int, rows: int) -> jax.Array:
    """The inverse of `cut_into_patches`.

    Args:
      patches: (B, P, size * size * channels).
      size: of a patch.
      rows: of the grid of patches.

    Returns:
      (B, height, width, channels).
    """
    B, P, _ = patches.shape
    x = patches.reshape(B, rows, P // rows, size, size, -1)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * size, P // rows * size, -1)


class PatchTokens(nnx.Module):
    """Each patch through one dense layer (Dosovitskiy et al. 2021, equation 1).

    The same as a convolution whose stride is its size.

    Args:
      size: of a patch in pixels.
      channels: of an image.
      width: D.
      kernel_init: initialiser of the matrix.
      dtype: compute dtype.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        width: int,
        *,
        kernel_init: nnx.initializers.Initializer,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        self.size = size
        self.projection = nnx.Linear(
            size * size * channels, width,
            kernel_init=kernel_init, dtype=jnp.dtype(dtype), dot_general=dense_dot_general, rngs=rngs,
        )  # fmt: skip

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the patches of an image.

        Raises:
          ValueError: patches that do not divide the image.
        """
        if height % self.size or width % self.size:
            raise ValueError(f"images of {height} x {width} pixels are not divided by patches of {self.size}")
        return height // self.size, width // self.size

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (B, height, width, channels) -> (B, P, D)."""
        return self.projection(cut_into_patches(images, self.size))


def _pooled(x: jax.Array) -> jax.Array:
    """The largest of each 3 x 3 pixels around every second one: (B, height, width, C) -> halves, rounded up.

    As maxima of slices: the gradient of a window's maximum is a search in every window, which is slow on a CPU.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    for axis, size in ((1, -(-height // 2)), (2, -(-width // 2))):
        first, *others = (jax.lax.slice_in_dim(x, n, n + 2 * size - 1, 2, axis=axis) for n in range(3))
        x = functools.reduce(jnp.maximum, others, first)
    return x


class ConvolutionalTokens(nnx.Module):
    """Convolutions with ReLU and maximum pooling, whose last map's pixels are the tokens (Hassani et al. 2021,
    "Escaping the Big Data Paradigm with Compact Transformers", equation 2).

    Convolutions see neighbouring pixels as neighbours, which patches must learn from data. Each has 3 x 3
    pixels and no bias, and its pooling of 3 x 3 with stride 2 halves the grid.

    Args:
      layers: number of convolutions.
      channels: of an image.
      hidden: channels between convolutions.
      width: D.
      dtype: compute dtype.
      rngs: source of the initial values.
    """

    def __init__(self, layers: int, channels: int, hidden: int, width: int, *, dtype: str, rngs: nnx.Rngs):
        sizes = [channels, *[hidden] * (layers - 1), width]
        self.convolutions = nnx.List(
            nnx.Conv(
                before, after, (3, 3), use_bias=False, dtype=jnp.dtype(dtype),
                kernel_init=nnx.initializers.he_normal(), conv_general_dilated=conv_general_dilated, rngs=rngs,
            )
            for before, after in itertools.pairwise(sizes)
        )  # fmt: skip

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the last map."""
        for _ in self.convolutions:
            height, width = -(-height // 2), -(-width // 2)
        return height, width

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (B, height, width, channels) -> (B, P, D)."""
        x = images
        for convolution in self.convolutions:
            x = _pooled(jax.nn.relu(convolution(x)))
        return x.reshape(x.shape[0], -1, x.shape[-1])
