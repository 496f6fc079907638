"""Replacements of named values for causal experiments; see `activations.replaced`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AtLayer:
    """A `Replacement` that changes the value of one layer.

    Attributes:
      layer: Number of the layer, from 0; a traced integer lets one program serve all layers.
      change: Function from the value to the new value.
      head: Number of the head that `change` replaces in values (B, T, H, K), or None.
    """

    layer: Any
    change: Callable[[jax.Array], jax.Array]
    head: Any = None

    def __call__(self, value: jax.Array, number: Any) -> jax.Array:
        """Return the changed value in the selected layer, and the value itself in all others."""
        return jnp.where(number == self.layer, self.change(value), value)

    def check(self, name: str, value: jax.Array, layers: int | None) -> None:
        """Check that the layer and the head exist; traced numbers are not checked.

        Raises:
          ValueError: The layer or the head does not exist, so nothing would change.
        """
        if isinstance(self.layer, int) and not 0 <= self.layer < (layers or self.layer + 1):
            limits = "counts its layers from 0" if layers is None else f"has layers 0 to {layers - 1}"
            raise ValueError(f"{name} {limits}: there is no layer {self.layer}")
        if isinstance(self.head, int) and not 0 <= self.head < value.shape[2]:
            raise ValueError(f"{name} has heads 0 to {value.shape[2] - 1}: there is no head {self.head}")


def ablate_head(layer: Any, head: Any, *, by: Any = 0.0) -> AtLayer:
    """Return a replacement for "heads" (B, T, H, K) that sets one head's output to a constant.

    Args:
      layer: Number of the layer, from 0; may be a traced integer.
      head: Number of the head, from 0; may be a traced integer.
      by: Constant, broadcastable to (B, T, K): zeros, or the head's mean over some data.
    """
    return AtLayer(layer, lambda value: value.at[:, :, head].set(jnp.asarray(by, value.dtype)), head)


def patch(layer: Any, source: Any, *, positions: Sequence[int] | jax.Array | None = None) -> AtLayer:
    """Return a replacement that takes one layer's value from another run ("causal tracing", Meng et al. 2022).

    Args:
      layer: Number of the layer, from 0; may be a traced integer.
      source: (L, B, T, ...), the value that `activations` returned for the other run.
      positions: Positions to replace; None replaces all T.

    Raises:
      ValueError: The other run does not have the layer.
    """
    if isinstance(layer, int) and not 0 <= layer < len(source):
        raise ValueError(f"the other run has layers 0 to {len(source) - 1}: there is no layer {layer}")

    def change(value: jax.Array) -> jax.Array:
        new_value = jnp.asarray(source)[layer].astype(value.dtype)
        if positions is None:
            return new_value
        indices = jnp.asarray(positions)
        return value.at[:, indices].set(new_value[:, indices])

    return AtLayer(layer, change)
