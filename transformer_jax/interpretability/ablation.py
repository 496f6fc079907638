"""What takes the place of a named value in a causal experiment; see `activations.replaced`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AtLayer:
    """Another value in one layer, a `Replacement`.

    Attributes:
      layer: from 0; may be a traced integer, so that one program serves all layers.
      change: value -> the new one.
      head: the one that is changed, of values (B, T, H, K), or None.
    """

    layer: Any
    change: Callable[[jax.Array], jax.Array]
    head: Any = None

    def __call__(self, value: jax.Array, number: Any) -> jax.Array:
        return jnp.where(number == self.layer, self.change(value), value)

    def check(self, name: str, value: jax.Array, layers: int | None) -> None:
        """That there is such a layer and such a head; traced numbers are not known yet.

        Raises:
          ValueError: there is none, and nothing would be changed.
        """
        if isinstance(self.layer, int) and not 0 <= self.layer < (layers or self.layer + 1):
            has = "counts its layers from 0" if layers is None else f"has layers 0 to {layers - 1}"
            raise ValueError(f"{name} {has}: there is no layer {self.layer}")
        if isinstance(self.head, int) and not 0 <= self.head < value.shape[2]:
            raise ValueError(f"{name} has heads 0 to {value.shape[2] - 1}: there is no head {self.head}")


def ablate_head(layer: Any, head: Any, *, by: Any = 0.0) -> AtLayer:
    """One head's output set to a constant, for "heads" (B, T, H, K).

    Args:
      layer, head: from 0; may be traced integers.
      by: the constant, broadcastable to (B, T, K): zeros, or the head's mean over some data.
    """
    return AtLayer(layer, lambda value: value.at[:, :, head].set(jnp.asarray(by, value.dtype)), head)


def patch(layer: Any, source: Any, *, positions: Sequence[int] | jax.Array | None = None) -> AtLayer:
    """One layer's value taken from another run (Meng et al. 2022, "causal tracing").

    Args:
      layer: from 0; may be a traced integer.
      source: (L, B, T, ...), what `activations` returned of the other run.
      positions: which of the T; None: all.

    Raises:
      ValueError: a layer that the other run has not.
    """
    if isinstance(layer, int) and not 0 <= layer < len(source):
        raise ValueError(f"the other run has layers 0 to {len(source) - 1}: there is no layer {layer}")

    def change(value: jax.Array) -> jax.Array:
        own = jnp.asarray(source)[layer].astype(value.dtype)
        if positions is None:
            return own
        where = jnp.asarray(positions)
        return value.at[:, where].set(own[:, where])

    return AtLayer(layer, change)
