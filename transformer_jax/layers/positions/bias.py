"""Biases stored as positions, so that any part is computed only when it is needed."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from transformer_jax.layers.attention.visibility import take


class PositionBias(flax.struct.PyTreeNode):
    """The bias that a position scheme adds to the logits.

    Attributes:
      scheme: A `PositionScheme`, whose `bias` is called.
      queries: (T,) or (B, T) positions of the queries.
      keys: (S,) or (B, S) positions of the keys.
    """

    scheme: Any
    queries: jax.Array
    keys: jax.Array

    def dense(self) -> jax.Array:
        """Return the bias, broadcastable to (B, H, T, S)."""
        return self.scheme.bias(self.queries, self.keys)

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the bias for query indices (t,) and key indices (s,), broadcastable to (B, H, t, s)."""
        return self.scheme.bias(take(self.queries, queries, -1), take(self.keys, keys, -1))
