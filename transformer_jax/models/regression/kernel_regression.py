"""Nadaraya-Watson regression and classification with a width that is given or learned."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.kernel_pooling import KERNELS, kernel_pooling


@dataclasses.dataclass(frozen=True)
class KernelRegressionConfig:
    """What the model computes.

    Attributes:
      kernel: "gaussian", "boxcar", "epanechnikov" or "constant".
      inputs: D.
      width: the kernel's first width.
      each_coordinate: a width for each coordinate of the inputs rather than one for all.

    Raises:
      ValueError: a value outside its choices or its range.
    """

    kernel: str
    inputs: int = 1
    width: float = 1.0
    each_coordinate: bool = False

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel {self.kernel!r} is not one of {', '.join(KERNELS)}")
        if self.inputs < 1:
            raise ValueError(f"inputs={self.inputs} must be at least 1")
        if not self.width > 0:
            raise ValueError(f"a kernel's width of {self.width} must be above 0")


class KernelRegression(nnx.Module):
    """A memory of examples that is asked by similarity; all that it learns is how far "near" goes.

    Args:
      config: what it computes.
    """

    def __init__(self, config: KernelRegressionConfig):
        self.config = config
        shape = (config.inputs,) if config.each_coordinate else ()
        # Its logarithm, so that no step of an optimizer makes a width of 0.
        self.log_width = nnx.Param(jnp.full(shape, jnp.log(config.width)))

    @property
    def width(self) -> jax.Array:
        """The width, or one for each coordinate (D,)."""
        return jnp.exp(self.log_width[...])

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Queries (T, D), examples (S, D) with values (S, C) -> (means (T, C), weights (T, S)).

        For classification the values are one-hot, and the means are probabilities.
        """
        return kernel_pooling(query, key, value, kernel=self.config.kernel, width=self.width, mask=mask)

    def leave_one_out(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What each example is answered with by all others: what a width is learned on, since an example
        that may ask itself is best served by a width of 0.

        Returns:
          (means (S, C), answered (S,) False where no other example is near enough).
        """
        means, weights = self(key, key, value, mask=~jnp.eye(len(key), dtype=bool))
        return means, weights.sum(axis=-1) > 0
