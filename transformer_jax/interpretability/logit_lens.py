"""The logit lens: the prediction after each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.interpretability.activations import activations


def logit_lens(
    model: Any, *inputs: jax.Array, run: Callable[..., Any] | None = None, **options: Any
) -> jax.Array:
    """Compute logits from the residual stream after each layer (nostalgebraist 2020).

    Args:
      model: Causal decoder, or a Transformer, of which the decoder is read.
      *inputs: Positional arguments of the model.
      run: Function to run instead of the model, such as `replaced(model, ...)`.
      **options: Keyword arguments of the model.

    Returns:
      (L + 1, B, T, V) float32; the first entry reads the embeddings, the last one equals the model's logits.

    Raises:
      ValueError: The model has no residual stream.
    """
    function = model if run is None else run
    _, values = activations(function, *inputs, only=["decoder/embedding", "decoder/residual"], **options)
    stream = jnp.concatenate([values["decoder/embedding"][None], values["decoder/residual"]])
    # One layer at a time, because all logits together need L + 1 times the memory of the model's.
    return jax.lax.map(model.logits, stream)
