"""Positions of image patches: tables resized to other grids, and sines and cosines in two dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.positions.absolute import sinusoidal_positions


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel (Keys 1981, equation 4) at distances |x|."""
    x = np.abs(distance)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def cubic_resize_matrix(old: int, new: int, *, antialias: bool = False) -> np.ndarray:
    """The matrix that resizes a row of values by cubic convolution, with pixels' centres at halves.

    The two forms that published vision models have been trained and used with, as torch computes them: Keys'
    parameter -0.75 with values beyond the border repeated, and -0.5 with a kernel that widens where a row
    shrinks and is normalised at the border.

    Args:
      old: values of the row.
      new: values of the resized one.
      antialias: the second form.

    Returns:
      (new, old) float32.
    """
    scale = old / new
    centres = (np.arange(new) + 0.5) * scale - 0.5
    if antialias:
        stretch = max(scale, 1.0)
        weights = _cubic((np.arange(old)[None] - centres[:, None]) / stretch, -0.5)
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    matrix = np.zeros((new, old))
    first = np.floor(centres).astype(int)
    for offset in (-1, 0, 1, 2):
        place = first + offset
        np.add.at(matrix, (np.arange(new), np.clip(place, 0, old - 1)), _cubic(centres - place, -0.75))
    return matrix.astype(np.float32)


def resized_grid(
    table: jax.Array, old: tuple[int, int], new: tuple[int, int], *, antialias: bool = False
) -> jax.Array:
    """Vectors of a grid of patches as those of another grid, by cubic interpolation (Dosovitskiy et al. 2021,
    section 3.2).

    Args:
      table: (rows * columns, D), row by row.
      old: (rows, columns) of the table.
      new: (rows, columns) of the result.
      antialias: see `cubic_resize_matrix`.

    Returns:
      (rows * columns, D) float32 of the new grid; the table itself where the grids are the same.
    """
    if old == new:
        return table
    grid = table.astype(jnp.float32).reshape(*old, -1)
    down, across = (cubic_resize_matrix(o, n, antialias=antialias) for o, n in zip(old, new, strict=True))
    resized = jnp.einsum("ab,bcd,ec->aed", down, grid, across, precision="highest")
    return resized.reshape(-1, table.shape[-1])


def sinusoidal_grid(rows: int, columns: int, width: int) -> jax.Array:
    """Sines and cosines of each patch's row and column, half of the width each (Chen et al. 2021, MoCo v3).

    Args:
      rows, columns: of the grid.
      width: D, a multiple of 4.

    Returns:
      (rows * columns, D) float32.

    Raises:
      ValueError: a width that 4 does not divide.
    """
    if width % 4:
        raise ValueError(f"positions in two dimensions need a width that 4 divides, got {width}")
    down = sinusoidal_positions(jnp.arange(rows), width // 2)
    across = sinusoidal_positions(jnp.arange(columns), width // 2)
    grid = (rows, columns, width // 2)
    both = [jnp.broadcast_to(down[:, None], grid), jnp.broadcast_to(across[None], grid)]
    return jnp.concatenate(both, axis=-1).reshape(rows * columns, width)
