"""What takes the place of a named value in a causal experiment; see `activations.replaced`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.looking.activations import Replacement


def ablate_head(layer: Any, head: Any, *, by: Any = 0.0) -> Replacement:
    """One head's output set to a constant, for "heads" (B, T, H, K).

    Args:
      layer, head: from 0; may be traced integers, so that one program serves all heads.
      by: the constant, broadcastable to (B, T, K): zeros, or the head's mean over some data.
    """

    def replacement(value: jax.Array, number: Any) -> jax.Array:
        new = value.at[:, :, head].set(jnp.asarray(by, value.dtype))
        return jnp.where(number == layer, new, value)

    return replacement


def patch(layer: Any, source: jax.Array, *, positions: Sequence[int] | jax.Array | None = None) -> Replacement:
    """One layer's value taken from another run (Meng et al. 2022, "causal tracing").

    Args:
      layer: from 0.
      source: (L, B, T, ...), what `activations` returned of the other run.
      positions: which of the T; None: all.
    """

    def replacement(value: jax.Array, number: Any) -> jax.Array:
        own = source[number].astype(value.dtype)
        new = (
            own
            if positions is None
            else value.at[:, jnp.asarray(positions)].set(own[:, jnp.asarray(positions)])
        )
        return jnp.where(number == layer, new, value)

    return replacement
