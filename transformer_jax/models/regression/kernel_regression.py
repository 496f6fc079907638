"""Nadaraya-Watson regression and classification with a fixed or learned kernel width."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.kernel_pooling import KERNELS, kernel_pooling
from transformer_jax.models.config_checks import check_minimum


@dataclasses.dataclass(frozen=True)
class KernelRegressionConfig:
    """The config of kernel regression.

    Attributes:
      kernel: Kernel, "gaussian", "boxcar", "epanechnikov" or "constant".
      inputs: Number of input coordinates D.
      width: Initial width of the kernel.
      each_coordinate: Learn a width for each input coordinate instead of one for all.

    Raises:
      ValueError: A value is not among its choices or out of range.
    """

    kernel: str
    inputs: int = 1
    width: float = 1.0
    each_coordinate: bool = False

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel {self.kernel!r} is not one of {', '.join(KERNELS)}")
        check_minimum(self, 1, "inputs")
        if not self.width > 0:
            raise ValueError(f"a kernel's width of {self.width} must be above 0")


class KernelRegression(nnx.Module):
    """Attention over examples by similarity to the query; the kernel's width is the only parameter.

    Args:
      config: The kernel and its initial width.
    """

    def __init__(self, config: KernelRegressionConfig):
        self.config = config
        shape = (config.inputs,) if config.each_coordinate else ()
        # The parameter is the logarithm, so that no optimizer step can make the width 0 or negative.
        self.log_width = nnx.Param(jnp.full(shape, jnp.log(config.width)))

    @property
    def width(self) -> jax.Array:
        """The kernel's width, () or (D,)."""
        return jnp.exp(self.log_width[...])

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Predict the values of queries as weighted means of the examples' values.

        Args:
          query: (T, D).
          key: (S, D) inputs of the examples.
          value: (S, C) values of the examples; one-hot for classification, so that the means are probabilities.
          mask: (T, S), True if a query may use an example; None means all.

        Returns:
          (means (T, C), weights (T, S)).
        """
        return kernel_pooling(query, key, value, kernel=self.config.kernel, width=self.width, mask=mask)

    def leave_one_out(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Predict the value of each example from all other examples.

        The width is learned on these predictions: with the example itself included, a width of 0 would be best.

        Args:
          key: (S, D) inputs of the examples.
          value: (S, C) values of the examples.

        Returns:
          (means (S, C), answered (S,), False if no other example is near enough).
        """
        means, weights = self(key, key, value, mask=~jnp.eye(len(key), dtype=bool))
        return means, weights.sum(axis=-1) > 0
