"""Token embeddings whose table is padded so that any mesh divides it, and logits tied to them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.float32_product import float32_product


def padded_size(vocab_size: int, multiple: int) -> int:
    """The number of rows that the table holds: the next multiple (contract: users never see it)."""
    return -(-vocab_size // multiple) * multiple


def count_without_padding(model: Any, *tables: "TokenEmbedding | None") -> int:
    """Number of parameters of a model, the padding of its tables not counted."""
    padding = sum(t.table.embedding.size - t.vocab_size * t.table.features for t in tables if t is not None)
    return sum(x.size for x in jax.tree.leaves(model)) - padding


class TokenEmbedding(nnx.Module):
    """A table of V vectors; rows past V are zero, are never read and never get a gradient.

    Args:
      vocab_size: V.
      width: D.
      multiple: the table is padded to a multiple of this many rows.
      std: standard deviation of the normal initial values, the same whatever `multiple` is.
      dtype: dtype of the looked-up vectors; the table is float32.
      rngs: source of the initial values.
    """

    def __init__(self, vocab_size: int, width: int, *, multiple: int, std: float, dtype: str, rngs: nnx.Rngs):
        def init(key, shape, param_dtype):
            rows = nnx.initializers.normal(std)(key, (vocab_size, shape[1]), param_dtype)
            return jnp.pad(rows, ((0, shape[0] - vocab_size), (0, 0)))

        self.table = nnx.Embed(
            padded_size(vocab_size, multiple),
            width,
            embedding_init=init,
            dtype=jnp.dtype(dtype),
            rngs=rngs,
        )
        self.vocab_size = vocab_size

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens (...) -> (..., D)."""
        return self.table(tokens)

    def without_padding(self) -> "TokenEmbedding":
        """The same with a table of V rows, which `output_weight` need not cut: for decoding."""
        copy = nnx.merge(*nnx.split(self))
        copy.table.embedding = nnx.Param(self.table.embedding[: self.vocab_size])
        copy.table.num_embeddings = self.vocab_size
        return copy

    def output_weight(self, dtype: Any) -> jax.Array:
        """(V, D) the rows that logits are made of; a loop of steps takes them once, before it starts."""
        # The table is cut to V rows, not the logits to V columns: that is the smaller copy by far, in the
        # backward pass as well.
        return self.table.embedding[: self.vocab_size].astype(dtype)

    def logits(self, x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """x (..., D) -> (..., V) float32: the product with the table (Press & Wolf 2017).

        Not `nnx.Embed.attend`, which would round the logits to the compute dtype. `weight` is what
        `output_weight` gave, where it was taken before.
        """
        weight = self.output_weight(x.dtype) if weight is None else weight
        return float32_product("...d,vd->...v", x, weight)
