"""Normalisations of the residual stream."""

from typing import Protocol

import jax.numpy as jnp
from flax import nnx


class NormConfig(Protocol):
    """The fields of a model's config that a normalisation reads."""

    @property
    def width(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def dtype(self) -> str: ...


def layer_norm(
    config: NormConfig, rngs: nnx.Rngs, *, use_bias: bool = True, width: int | None = None
) -> nnx.LayerNorm:
    """Layer normalisation with the config's epsilon, of its width if no other is given.

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
    """x / rms(x), times a trained scale (Zhang & Sennrich 2019)."""
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_scale=use_scale,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        rngs=rngs,
    )
