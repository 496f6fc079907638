"""Keys and values of the tokens that a decoder has already read."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.fusion_barrier import materialised


class KeyValueCache(flax.struct.PyTreeNode):
    """Keys and values of the tokens seen so far, in a buffer of fixed length.

    W beams of a sentence share its row: the buffer then holds W entries for each position, next to each
    other, and a mask says which of them are a beam's own history. Beams change places by changing the
    mask; no key is moved.

    The length is the last axis in memory: the products of one-token steps read the cache in this order,
    and would otherwise copy all of it into this order at every step.

    Attributes:
      keys, values: (B, G, K, S), filled up to the number of tokens seen.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array) -> "KeyValueCache":
        """A full cache of keys and values (B, S, G, K)."""
        return cls(jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 3))

    @classmethod
    def empty(cls, rows: int, length: int, kv_heads: int, head_width: int, dtype: Any) -> "KeyValueCache":
        """Room for `length` tokens of each of the B rows."""
        buffer = jnp.zeros((rows, kv_heads, head_width, length), dtype)
        return cls(buffer, buffer)

    @property
    def key(self) -> jax.Array:
        """(B, S, G, K)."""
        return jnp.moveaxis(self.keys, 3, 1)

    @property
    def value(self) -> jax.Array:
        """(B, S, G, K)."""
        return jnp.moveaxis(self.values, 3, 1)

    @property
    def length(self) -> int:
        """The number of entries S that it has room for."""
        return self.keys.shape[3]

    def append(self, key: jax.Array, value: jax.Array, at: jax.Array) -> "KeyValueCache":
        """The cache with N new tokens (B, N, G, K) written from position `at` on.

        Where there are W times the cache's rows, they are the beams of each sentence.
        """
        beams = key.shape[0] // self.keys.shape[0]

        def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(-1, beams, *new.shape[1:])  # (B, W, N, G, K) -> (B, G, K, N W)
            new = new.transpose(0, 3, 4, 2, 1).reshape(*buffer.shape[:3], -1).astype(buffer.dtype)
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, at * beams, axis=3)

        # Stored before it is read: XLA's CPU backend would fuse the writing into each of its readers, and copy
        # the whole cache for each of them in every step.
        return KeyValueCache(materialised(write(self.keys, key)), materialised(write(self.values, value)))
