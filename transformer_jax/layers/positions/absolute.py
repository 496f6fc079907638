"""Positional encodings as pure functions of positions."""

import jax
import jax.numpy as jnp
import numpy as np


def sinusoidal_positions(positions: jax.Array, width: int, *, max_wavelength: float = 10_000.0) -> jax.Array:
    """Compute sinusoids with geometrically growing wavelengths (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / D)),  PE(pos, 2i + 1) = cos(pos / 10000^(2i / D)).

    Args:
      positions: (...) token positions, counted from 0.
      width: D, even.
      max_wavelength: The 10000 of the formula.

    Returns:
      (..., D) float32, sines at even and cosines at odd indices as in the paper.

    Raises:
      ValueError: The width is odd.
    """
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {width}")
    # NumPy computes the constant frequencies in float64 before they are rounded.
    frequencies = (max_wavelength ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, width)


def learned_positions(positions: jax.Array, table: jax.Array) -> jax.Array:
    """Return rows of a trained table (Gehring et al. 2017).

    Args:
      positions: (...) token positions, below the number of rows.
      table: (max_length, D).

    Returns:
      (..., D) in the table's dtype.
    """
    return table[positions]


def segment_positions(segments: jax.Array) -> jax.Array:
    """Return the position of each token in its segment: [1, 1, 1, 2, 2, 0] -> [0, 1, 2, 0, 1, 0].

    Args:
      segments: (B, T) integers; adjacent equal numbers form a segment.

    Returns:
      (B, T) int32, counted from 0.
    """
    index = jnp.arange(segments.shape[1])
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
