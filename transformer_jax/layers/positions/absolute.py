"""Positional encodings as pure functions of positions."""

import jax
import jax.numpy as jnp
import numpy as np


def sinusoidal_positions(positions: jax.Array, width: int, *, max_wavelength: float = 10_000.0) -> jax.Array:
    """Sinusoids of geometrically growing wavelengths (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / D)),  PE(pos, 2i + 1) = cos(pos / 10000^(2i / D)).

    Args:
      positions: (...) token positions, counted from 0.
      width: D, even.
      max_wavelength: the 10000 of the formula.

    Returns:
      (..., D) float32, sines at even and cosines at odd places as in the paper.

    Raises:
      ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {width}")
    # The frequencies are constants: NumPy computes them in float64 before they are rounded.
    frequencies = (max_wavelength ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, width)


def learned_positions(positions: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of a trained table (Gehring et al. 2017).

    Args:
      positions: (...) token positions, below the number of rows.
      table: (max_length, D).

    Returns:
      (..., D) in the table's dtype.
    """
    return table[positions]


def segment_positions(segments: jax.Array) -> jax.Array:
    """The position of each token in its own segment: [1, 1, 1, 2, 2, 0] -> [0, 1, 2, 0, 1, 0].

    Args:
      segments: (B, T) integers, equal numbers next to each other belong together.

    Returns:
      (B, T) int32, counted from 0.
    """
    place = jnp.arange(segments.shape[1])
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
