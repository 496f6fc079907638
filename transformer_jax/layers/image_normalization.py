"""Normalization of the pixels of images."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def normalize_images(images: jax.Array | np.ndarray, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Normalize pixels (..., 3) uint8 to float32: (value / 255 - mean) / std."""
    channel_mean, channel_std = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return (jnp.asarray(images).astype(jnp.float32) / 255 - channel_mean) / channel_std
