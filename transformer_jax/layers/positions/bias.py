"""A bias that follows from positions, kept as positions: any part of it is made when it is needed."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from transformer_jax.layers.attention.visibility import taken


class PositionBias(flax.struct.PyTreeNode):
    """What a position scheme adds to the logits of some queries and keys.

    Attributes:
      scheme: see `position_schemes`; its `bias` is asked.
      queries: (T,) or (B, T) positions.
      keys: (S,) or (B, S) positions.
    """

    scheme: Any
    queries: jax.Array
    keys: jax.Array

    def dense(self) -> jax.Array:
        """Broadcastable to (B, H, T, S)."""
        return self.scheme.bias(self.queries, self.keys)

    def part(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Of the queries and keys at these places (t,) and (s,), broadcastable to (B, H, t, s)."""
        return self.scheme.bias(taken(self.queries, queries, -1), taken(self.keys, keys, -1))
