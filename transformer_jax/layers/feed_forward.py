"""The position-wise feed-forward network."""

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
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


class FeedForward(nnx.Module):
    """act(x W1 + b1) W2 + b2 (Vaswani et al. 2017, equation 2).

    Args:
      width: D.
      hidden: F.
      activation: a name in `ACTIVATIONS`; "gelu" is the exact one.
      use_bias: b1 and b2.
      kernel_init: initialiser of both matrices.
      output_init: of the second matrix, where it is another.
      dtype: compute dtype; parameters are float32.
      rngs: source of the initial values.
    """

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
        self.expand = nnx.Linear(width, hidden, kernel_init=kernel_init, **options)
        self.contract = nnx.Linear(hidden, width, kernel_init=output_init or kernel_init, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        return self.contract(ACTIVATIONS[self.activation](self.expand(x)))


class GatedFeedForward(nnx.Module):
    """(act(x Wg) * x W1) W2 (Shazeer 2020); SwiGLU where the activation is "silu".

    Args: those of `FeedForward`.
    """

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
        self.gate = nnx.Linear(width, hidden, kernel_init=kernel_init, **options)
        self.expand = nnx.Linear(width, hidden, kernel_init=kernel_init, **options)
        self.contract = nnx.Linear(hidden, width, kernel_init=output_init or kernel_init, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        return self.contract(ACTIVATIONS[self.activation](self.gate(x)) * self.expand(x))
