"""Position-wise feed-forward networks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.dense import dense_dot_general

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # Hendrycks & Gimpel 2016; GPT-2's
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks & Gimpel 2016; CLIP's
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


class FeedForward(nnx.Module):
    """The network act(x W1 + b1) W2 + b2 (Vaswani et al. 2017, equation 2).

    Args:
      width: D.
      hidden: F.
      activation: A name in `ACTIVATIONS`; "gelu" is exact.
      use_bias: Add b1 and b2.
      kernel_init: Initializer of the matrices.
      output_init: Initializer of the last matrix; None uses `kernel_init`.
      dtype: Compute dtype; parameters are float32.
      rngs: Source of the initial values.
    """

    gated = False

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str,
        use_bias: bool,
        kernel_init: nnx.initializers.Initializer,
        output_init: nnx.initializers.Initializer | None = None,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(
            use_bias=use_bias, dtype=jnp.dtype(dtype), dot_general=dense_dot_general, rngs=rngs
        )
        if self.gated:
            self.gate = nnx.Linear(width, hidden, kernel_init=kernel_init, **options)
        self.expand = nnx.Linear(width, hidden, kernel_init=kernel_init, **options)
        self.contract = nnx.Linear(hidden, width, kernel_init=output_init or kernel_init, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the network to x (B, T, D)."""
        return self.contract(ACTIVATIONS[self.activation](self.expand(x)))


class GatedFeedForward(FeedForward):
    """The network (act(x Wg) * x W1) W2 (Shazeer 2020), SwiGLU with "silu"; see `FeedForward`."""

    gated = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the network to x (B, T, D)."""
        return self.contract(ACTIVATIONS[self.activation](self.gate(x)) * self.expand(x))
