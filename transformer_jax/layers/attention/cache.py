"""Cache of the keys and values of previous tokens."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.fusion_barrier import materialize


class KeyValueCache(flax.struct.PyTreeNode):
    """Keys and values of previous tokens, in a buffer of fixed length.

    W beams of a sentence share its row: the buffer holds W adjacent entries for each position, and a mask marks
    those of a beam's own history. Reordering beams changes the mask and moves no key.

    The length is the last axis in memory, the order in which the products of one-token steps read the cache;
    from another order each step would copy the entire cache.

    Attributes:
      keys: (B, G, K, S), filled up to the number of previous tokens.
      values: (B, G, K, S), filled up to the number of previous tokens.
      rolls: The buffer holds the last tokens only: the token at position p is in entry p modulo the length.
    """

    keys: jax.Array
    values: jax.Array
    rolls: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array) -> "KeyValueCache":
        """Return a full cache of keys and values (B, S, G, K)."""
        return cls(jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 3))

    @classmethod
    def empty(
        cls, rows: int, length: int, kv_heads: int, head_width: int, dtype: Any, *, rolls: bool = False
    ) -> "KeyValueCache":
        """Return a cache for `length` tokens of each of the B rows."""
        buffer = jnp.zeros((rows, kv_heads, head_width, length), dtype)
        return cls(buffer, buffer, rolls)

    @property
    def key(self) -> jax.Array:
        """The keys (B, S, G, K)."""
        return jnp.moveaxis(self.keys, 3, 1)

    @property
    def value(self) -> jax.Array:
        """The values (B, S, G, K)."""
        return jnp.moveaxis(self.values, 3, 1)

    @property
    def length(self) -> int:
        """The number of entries S."""
        return self.keys.shape[3]

    def append(self, key: jax.Array, value: jax.Array, at: jax.Array) -> "KeyValueCache":
        """Return the cache with N new tokens (B, N, G, K) written from position `at` on.

        Tokens with W times as many rows as the cache are those of W beams per sentence.
        """
        beams, count = key.shape[0] // self.keys.shape[0], key.shape[1]
        length = self.length // beams

        def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
            new = self._entries(new).astype(buffer.dtype)
            if not self.rolls:
                return jax.lax.dynamic_update_slice_in_dim(buffer, new, at * beams, axis=3)
            if count == 1:
                return jax.lax.dynamic_update_slice_in_dim(buffer, new, at % length * beams, axis=3)
            # Entry n gets the last new token whose position is n modulo the length, if there is one.
            last = at + count - 1
            numbers = count - 1 - (last - jnp.arange(length)) % length
            new = jnp.take(new.reshape(*new.shape[:3], count, beams), numbers, axis=3, mode="clip")
            old = buffer.reshape(*buffer.shape[:3], length, beams)
            return jnp.where((numbers >= 0)[:, None], new, old).reshape(buffer.shape)

        # Without a barrier XLA's CPU backend would fuse the update into each reader and copy the entire cache.
        keys, values = materialize(write(self.keys, key)), materialize(write(self.values, value))
        return KeyValueCache(keys, values, self.rolls)

    def followed_by(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values (B, S + N W, G, K) of the cache and, after them, of new tokens."""
        return (
            jnp.concatenate([self.key, jnp.moveaxis(self._entries(key), 3, 1)], axis=1),
            jnp.concatenate([self.value, jnp.moveaxis(self._entries(value), 3, 1)], axis=1),
        )

    def _entries(self, new: jax.Array) -> jax.Array:
        """Reshape new tokens (B W, N, G, K) of W beams to entries (B, G, K, N W)."""
        rows = self.keys.shape[0]
        new = new.reshape(rows, -1, *new.shape[1:]).transpose(0, 3, 4, 2, 1)
        return new.reshape(*new.shape[:3], -1)
