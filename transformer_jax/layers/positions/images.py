"""Positions of image patches: tables resized to other grids, and two-dimensional sinusoids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.positions.absolute import sinusoidal_positions


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Compute Keys' cubic convolution kernel (Keys 1981, equation 4) at distances |x|."""
    x = np.abs(distance)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def cubic_resize_matrix(old: int, new: int, *, antialias: bool = False) -> np.ndarray:
    """Return the matrix that resizes a row of values by cubic convolution, with pixel centers at halves.

    These are the two forms that published vision models use, as torch computes them: parameter -0.75 with
    repeated border values, and parameter -0.5 with a kernel that is widened for shrinking and normalized at the
    border.

    Args:
      old: Number of values in the row.
      new: Number of values in the resized row.
      antialias: Use the second form.

    Returns:
      (new, old) float32.
    """
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale - 0.5
    if antialias:
        stretch = max(scale, 1.0)
        weights = _cubic((np.arange(old)[None] - centers[:, None]) / stretch, -0.5)
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    matrix = np.zeros((new, old))
    first = np.floor(centers).astype(int)
    for offset in (-1, 0, 1, 2):
        index = first + offset
        np.add.at(matrix, (np.arange(new), np.clip(index, 0, old - 1)), _cubic(centers - index, -0.75))
    return matrix.astype(np.float32)


def resize_grid(
    table: jax.Array, old: tuple[int, int], new: tuple[int, int], *, antialias: bool = False
) -> jax.Array:
    """Resize the vectors of a grid of patches by cubic interpolation (Dosovitskiy et al. 2021, section 3.2).

    Args:
      table: (rows * columns, D), row by row.
      old: (rows, columns) of the table.
      new: (rows, columns) of the result.
      antialias: See `cubic_resize_matrix`.

    Returns:
      (rows * columns, D) float32 of the new grid; the table itself if the grids are equal.
    """
    if old == new:
        return table
    grid = table.astype(jnp.float32).reshape(*old, -1)
    down, across = (cubic_resize_matrix(o, n, antialias=antialias) for o, n in zip(old, new, strict=True))
    resized = jnp.einsum("ab,bcd,ec->aed", down, grid, across, precision="highest")
    return resized.reshape(-1, table.shape[-1])


def sinusoidal_grid(rows: int, columns: int, width: int) -> jax.Array:
    """Compute sinusoids of each patch's row and column, half of the width each (Chen et al. 2021, MoCo v3).

    Args:
      rows: Rows of the grid.
      columns: Columns of the grid.
      width: D, a multiple of 4.

    Returns:
      (rows * columns, D) float32.

    Raises:
      ValueError: The width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"two-dimensional sinusoids need a width that is a multiple of 4, got {width}")
    down = sinusoidal_positions(jnp.arange(rows), width // 2)
    across = sinusoidal_positions(jnp.arange(columns), width // 2)
    grid = (rows, columns, width // 2)
    halves = [jnp.broadcast_to(down[:, None], grid), jnp.broadcast_to(across[None], grid)]
    return jnp.concatenate(halves, axis=-1).reshape(rows * columns, width)
