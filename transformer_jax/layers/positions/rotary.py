"""Rotary position embedding: queries and keys are rotated by angles proportional to their position."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies for longer texts than in training.

    Attributes:
      kind: "linear" divides all frequencies by `factor` (Chen et al. 2023). "llama3" divides only low
        frequencies, with a ramp between (Grattafiori et al. 2024, the published code). "yarn" divides by the
        number of rotations within the trained length, and sharpens attention (Peng et al. 2024).
      factor: Ratio of the new length to the trained length.
      original_length: The trained length; not read by "linear".
      low_factor: For "llama3": wavelengths above original_length / low_factor are scaled.
      high_factor: For "llama3": wavelengths below original_length / high_factor are unchanged.
      beta_fast: For "yarn": dimensions with more rotations than this in the trained length are unchanged.
      beta_slow: For "yarn": dimensions with fewer rotations than this in the trained length are scaled.
      attention_factor: For "yarn": factor of queries and keys; None means 0.1 ln(factor) + 1.

    Raises:
      ValueError: The kind is unknown, the factor is below 1, or the trained length is missing.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rotary scaling {self.kind!r} is not one of linear, llama3, yarn")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"a rotary scaling factor of {self.factor} is below 1 or not finite")
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(f"rotary scaling {self.kind!r} needs original_length, the trained length")

    @property
    def magnitude(self) -> float:
        """Factor of queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def rotary_frequencies(width: int, *, theta: float, scaling: RotaryScaling | None = None) -> np.ndarray:
    """Compute the angles per position, theta^(-2i / K) for i below K / 2 (Su et al. 2021, equation 15).

    Args:
      width: K, the number of rotated dimensions of a head; even.
      theta: 10,000 in the paper, larger in models for long texts.
      scaling: Scaling of the frequencies, or None.

    Returns:
      (K / 2,) float32, radians.

    Raises:
      ValueError: The width is odd.
    """
    if width % 2:
        raise ValueError(f"rotary positions rotate pairs of dimensions, but the width {width} is odd")
    # NumPy computes the constant frequencies in float64 before they are rounded.
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is not None:
        unchanged = _unchanged_fraction(frequencies, width, theta, scaling)
        frequencies = unchanged * frequencies + (1 - unchanged) * (frequencies / scaling.factor)
    return frequencies.astype(np.float32)


def _unchanged_fraction(
    frequencies: np.ndarray, width: int, theta: float, scaling: RotaryScaling
) -> np.ndarray | float:
    """Return the fraction (K / 2,) of each frequency that scaling does not change, 0 to 1."""
    if scaling.kind == "linear":
        return 0.0
    if scaling.kind == "llama3":
        rotations = scaling.original_length * frequencies / (2 * math.pi)  # within the trained length
        ramp = (rotations - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
        return np.clip(ramp, 0, 1)

    def dimension(rotations: float) -> float:
        """Return the pair of dimensions with this number of rotations within the trained length."""
        wavelength = scaling.original_length / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    ramp = (np.arange(width // 2) - first) / max(last - first, 1e-3)
    return 1 - np.clip(ramp, 0, 1)


class Rotation(NamedTuple):
    """Cosines and sines of the rotation angles of tokens, (T, n) or (B, T, n) float32."""

    cosine: jax.Array
    sine: jax.Array


def rotation(positions: jax.Array, frequencies: np.ndarray, *, magnitude: float = 1.0) -> Rotation:
    """Compute the rotation by angles position * frequency, once for all layers and heads.

    Args:
      positions: (T,) or (B, T), counted from 0.
      frequencies: (n,) from `rotary_frequencies`.
      magnitude: See `RotaryScaling.magnitude`.
    """
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # (..., T, n)
    return Rotation(magnitude * jnp.cos(angles), magnitude * jnp.sin(angles))


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate each pair of dimensions (i, i + n) by its angle (Su et al. 2021, equation 34).

    The product of a rotated query and key depends only on their distance. The dimensions of a pair are n apart,
    as in published Llama weights, instead of adjacent as in the paper, a fixed permutation of the dimensions.

    Args:
      x: (B, T, H, K) queries or keys; the first 2n dimensions of K are rotated, the rest unchanged.
      rotation: Rotation of the T tokens.

    Returns:
      (B, T, H, K) in x's dtype; computed in float32.
    """
    cosine, sine = rotation.cosine[..., None, :], rotation.sine[..., None, :]
    n = cosine.shape[-1]
    first, second, rest = jnp.split(x, [n, 2 * n], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)
