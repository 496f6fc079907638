"""The position-wise feed-forward network."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.dense import dense_dot_general

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}


class FeedForward(nnx.Module):
    """act(x W1 + b1) W2 + b2 (Vaswani et al. 2017, equation 2).

    Args:
      width: D.
      hidden: F.
      activation: a name in `ACTIVATIONS`; "gelu" is the exact one.
      kernel_init: initialiser of both matrices.
      dtype: compute dtype; parameters are float32.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str,
        kernel_init: nnx.initializers.Initializer,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(
            kernel_init=kernel_init, dtype=jnp.dtype(dtype), dot_general=dense_dot_general, rngs=rngs
        )
        self.expand = nnx.Linear(width, hidden, **options)
        self.contract = nnx.Linear(hidden, width, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        return self.contract(ACTIVATIONS[self.activation](self.expand(x)))
