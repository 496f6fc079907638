"""What a model would answer if it stopped after each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.interpretability.activations import activations


def logit_lens(
    model: Any, *inputs: jax.Array, run: Callable[..., Any] | None = None, **options: Any
) -> jax.Array:
    """The logit lens (nostalgebraist 2020): the stream after each layer, read by the last norm and the logits.

    Args:
      model: a causal decoder or the Transformer, whose decoder is read.
      *inputs, **options: its arguments.
      run: what is run in the model's place, as `replaced(model, ...)`.

    Returns:
      (L + 1, B, T, V) float32; the first of them reads the embeddings, the last are the model's logits.

    Raises:
      ValueError: a model without a residual stream.
    """
    function = model if run is None else run
    _, seen = activations(function, *inputs, only=["decoder/embedding", "decoder/residual"], **options)
    stream = jnp.concatenate([seen["decoder/embedding"][None], seen["decoder/residual"]])
    # One layer at a time: all logits at once are L + 1 times what the model itself makes.
    return jax.lax.map(model.logits, stream)
