"""Norms of the residual stream."""

from typing import Protocol

import jax.numpy as jnp
from flax import nnx


class NormConfig(Protocol):
    """The fields of a model's config that norms read."""

    @property
    def width(self) -> int:
        """Width D of the residual stream."""

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of the norms."""

    @property
    def dtype(self) -> str:
        """Compute dtype."""


def layer_norm(
    config: NormConfig, rngs: nnx.Rngs, *, use_bias: bool = True, width: int | None = None
) -> nnx.LayerNorm:
    """Return a layer norm with the config's epsilon, of the config's width unless another is passed.

    The fast variance (mean of squares minus squared mean) of Flax's default loses digits in float32.
    """
    return nnx.LayerNorm(
        config.width if width is None else width,
        epsilon=config.norm_epsilon,
        use_bias=use_bias,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        rngs=rngs,
    )


def rms_norm(config: NormConfig, rngs: nnx.Rngs, *, use_scale: bool = True) -> nnx.RMSNorm:
    """Return an RMS norm: x / rms(x), times a trained scale (Zhang & Sennrich 2019)."""
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_scale=use_scale,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        rngs=rngs,
    )
