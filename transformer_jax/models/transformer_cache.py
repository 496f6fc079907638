"""What the Transformer's decoder keeps between two steps; beams change places by a mask."""

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.layers.attention import KeyValueCache


class TransformerCache(flax.struct.PyTreeNode):
    """A decoder between two steps, of B sentences with W beams each.

    Attributes:
      target: per layer, keys and values of the target tokens so far: B rows, W entries a position.
      memory: per layer, keys and values of the source, B rows: one copy for all beams.
      memory_mask: (B, 1, 1, S) or None.
      length: number of target tokens so far.
      history: (B, W, T) which of a position's W entries belongs to each beam.
    """

    target: tuple[KeyValueCache, ...]
    memory: tuple[KeyValueCache, ...]
    memory_mask: jax.Array | None
    length: jax.Array
    history: jax.Array

    def repeat(self, times: int) -> "TransformerCache":
        return self.replace(
            target=jax.tree.map(lambda x: jnp.repeat(x, times, axis=3), self.target),
            history=jnp.repeat(self.history * times, times, axis=1),
        )

    def reorder(self, rows: jax.Array) -> "TransformerCache":
        # Moving the keys themselves would read and write the whole cache in every step.
        B, W, T = self.history.shape
        return self.replace(history=self.history.reshape(B * W, T)[rows].reshape(B, W, T))

    def extended(self, new: int) -> tuple["TransformerCache", jax.Array]:
        """The cache once every beam has `new` more tokens of its own, but for their keys and values.

        Returns:
          (the cache, the mask (B, 1, W N, T W) of what each new token sees).
        """
        B, W, T = self.history.shape
        positions, beams = jnp.arange(T), jnp.arange(W)
        history = jnp.where(positions < self.length, self.history, beams[:, None])
        own = history[..., None] == beams  # (B, W, T, W)
        seen = positions <= self.length + jnp.arange(new)[:, None]  # (N, T)
        mask = own[:, :, None] & seen[:, :, None]  # (B, W, N, T, W)
        return self.replace(history=history, length=self.length + new), mask.reshape(B, 1, W * new, T * W)
