"""Rotary position embedding: queries and keys are turned by angles that grow with their position."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How trained frequencies are slowed down for longer texts than the model was trained on.

    Attributes:
      kind: "linear" divides all by `factor` (Chen et al. 2023); "llama3" only the slow ones, with a
        ramp between (Grattafiori et al. 2024, the published code); "yarn" likewise by how often they
        turn within the trained length, and sharpens attention (Peng et al. 2024).
      factor: how many times longer.
      original_length: the length that the model was trained on; not read by "linear".
      low_factor, high_factor: of "llama3": wavelengths above original_length / low_factor are slowed, those
        below original_length / high_factor kept.
      beta_fast, beta_slow: of "yarn": dimensions that turn more often than beta_fast in the trained
        length are kept, those below beta_slow slowed.
      attention_factor: of "yarn": queries and keys are multiplied by it; None is 0.1 ln(factor) + 1.

    Raises:
      ValueError: an unknown kind, a factor below 1, or no trained length where one is needed.
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
        """What queries and keys are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def rotary_frequencies(width: int, *, theta: float, scaling: RotaryScaling | None = None) -> np.ndarray:
    """Angles per position: theta^(-2i / K) for i below K / 2 (Su et al. 2021, equation 15).

    Args:
      width: K, the number of a head's dimensions that are turned; even.
      theta: 10,000 in the paper, larger in models for long texts.
      scaling: None keeps the formula's.

    Returns:
      (K / 2,) float32, radians.

    Raises:
      ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of dimensions: a width of {width} is odd")
    # Constants of the model: NumPy computes them in float64 before they are rounded.
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is not None:
        slowed = frequencies / scaling.factor
        kept = _kept(frequencies, width, theta, scaling)
        frequencies = kept * frequencies + (1 - kept) * slowed
    return frequencies.astype(np.float32)


def _kept(frequencies: np.ndarray, width: int, theta: float, scaling: RotaryScaling) -> np.ndarray | float:
    """(K / 2,) how much of each frequency is kept as it was trained, 0 to 1."""
    if scaling.kind == "linear":
        return 0.0
    if scaling.kind == "llama3":
        # In turns within the trained length.
        turns = scaling.original_length * frequencies / (2 * math.pi)
        ramp = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
        return np.clip(ramp, 0, 1)

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns so often within the trained length."""
        wavelength = scaling.original_length / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    ramp = (np.arange(width // 2) - first) / max(last - first, 1e-3)
    return 1 - np.clip(ramp, 0, 1)


class Rotation(NamedTuple):
    """Cosines and sines of the angles that tokens are turned by, (T, n) or (B, T, n) float32."""

    cosine: jax.Array
    sine: jax.Array


def rotation(positions: jax.Array, frequencies: np.ndarray, *, magnitude: float = 1.0) -> Rotation:
    """The angles position * frequency, once for all layers and heads.

    Args:
      positions: (T,) or (B, T), counted from 0.
      frequencies: (n,) from `rotary_frequencies`.
      magnitude: see `RotaryScaling.magnitude`.
    """
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # (..., T, n)
    return Rotation(magnitude * jnp.cos(angles), magnitude * jnp.sin(angles))


def rotate(x: jax.Array, turns: Rotation) -> jax.Array:
    """Turns each pair of dimensions (i, i + n) by its angle (Su et al. 2021, equation 34).

    The pairs are half a turned width apart, as in the published Llama weights, not neighbours as in the
    paper: a fixed permutation of the dimensions. The product of a query and a key then depends on
    their distance alone.

    Args:
      x: (B, T, H, K) queries or keys; the first 2n dimensions of K are turned, the others kept.
      turns: of the T tokens.

    Returns:
      (B, T, H, K) in x's dtype; computed in float32.
    """
    cosine, sine = turns.cosine[..., None, :], turns.sine[..., None, :]
    n = cosine.shape[-1]
    first, second, rest = jnp.split(x, [n, 2 * n], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], axis=-1)
