"""Tokens of images: patches with a projection, or a few convolutions."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.convolution import conv_general_dilated
from transformer_jax.layers.dense import dense_dot_general


def cut_into_patches(images: jax.Array, size: int) -> jax.Array:
    """Split images into square patches, row by row.

    Args:
      images: (B, height, width, channels).
      size: Size of a patch in pixels, a divisor of height and width.

    Returns:
      (B, P, size * size * channels), the pixels of each patch row by row with their channels.

    Raises:
      ValueError: Patches do not divide the images.
    """
    B, height, width, channels = images.shape
    if height % size or width % size:
        raise ValueError(f"patches of {size} pixels do not divide images of {height} x {width}")
    x = images.reshape(B, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, size * size * channels)


def join_patches(patches: jax.Array, size: int, rows: int) -> jax.Array:
    """Invert `cut_into_patches`.

    Args:
      patches: (B, P, size * size * channels).
      size: Size of a patch in pixels.
      rows: Number of rows in the grid of patches.

    Returns:
      (B, height, width, channels).
    """
    B, P, _ = patches.shape
    x = patches.reshape(B, rows, P // rows, size, size, -1)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * size, P // rows * size, -1)


class PatchTokens(nnx.Module):
    """A dense layer applied to each patch (Dosovitskiy et al. 2021, equation 1).

    It equals a convolution whose stride is its size.

    Args:
      size: Size of a patch in pixels.
      channels: Channels of an image.
      width: D.
      kernel_init: Initializer of the matrix.
      use_bias: Add a bias.
      dtype: Compute dtype.
      rngs: Source of the initial values.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        width: int,
        *,
        kernel_init: nnx.initializers.Initializer,
        use_bias: bool = True,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        self.size = size
        self.projection = nnx.Linear(
            size * size * channels, width, use_bias=use_bias,
            kernel_init=kernel_init, dtype=jnp.dtype(dtype), dot_general=dense_dot_general, rngs=rngs,
        )  # fmt: skip

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of the patches of an image.

        Raises:
          ValueError: Patches do not divide the image.
        """
        if height % self.size or width % self.size:
            raise ValueError(f"patches of {self.size} pixels do not divide images of {height} x {width}")
        return height // self.size, width // self.size

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the tokens (B, P, D) of images (B, height, width, channels)."""
        return self.projection(cut_into_patches(images, self.size))


def _max_pool(x: jax.Array) -> jax.Array:
    """Pool (B, height, width, C) with windows of 3 x 3 and stride 2, which halves both sizes, rounded up.

    It takes maxima of slices, because the gradient of a window's maximum is slow on a CPU.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    for axis, size in ((1, -(-height // 2)), (2, -(-width // 2))):
        slices = [jax.lax.slice_in_dim(x, n, n + 2 * size - 1, 2, axis=axis) for n in range(3)]
        x = functools.reduce(jnp.maximum, slices)
    return x


class ConvolutionalTokens(nnx.Module):
    """Convolutions with ReLU and max pooling whose last feature map's pixels are the tokens.

    The source is Hassani et al. 2021, "Escaping the Big Data Paradigm with Compact Transformers", equation 2.
    Convolutions know which pixels are neighbors, while patches must learn it from data. Each convolution has
    3 x 3 pixels and no bias, and its pooling of 3 x 3 with stride 2 halves the grid.

    Args:
      layers: Number of convolutions.
      channels: Channels of an image.
      hidden: Channels between convolutions.
      width: D.
      dtype: Compute dtype.
      rngs: Source of the initial values.
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
        """Return the (rows, columns) of the last feature map."""
        for _ in self.convolutions:
            height, width = -(-height // 2), -(-width // 2)
        return height, width

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the tokens (B, P, D) of images (B, height, width, channels)."""
        x = images
        for convolution in self.convolutions:
            x = _max_pool(jax.nn.relu(convolution(x)))
        return x.reshape(x.shape[0], -1, x.shape[-1])
