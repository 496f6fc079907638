"""Token embeddings, padded so that any mesh divides the table, and logits tied to them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.float32_product import float32_product


def padded_size(vocab_size: int, multiple: int) -> int:
    """Return the number of rows of the table, the next multiple of `multiple`; users see only `vocab_size`."""
    return -(-vocab_size // multiple) * multiple


def count_without_padding(model: Any, *tables: "TokenEmbedding | None") -> int:
    """Return the number of parameters of a model without the padding of its tables."""
    padding = sum(t.table.embedding.size - t.vocab_size * t.table.features for t in tables if t is not None)
    return sum(x.size for x in jax.tree.leaves(model)) - padding


class TokenEmbedding(nnx.Module):
    """A table of V vectors; rows after V are zero, never read, and get no gradient.

    Args:
      vocab_size: V.
      width: D.
      multiple: The table is padded to a multiple of this number of rows.
      std: Standard deviation of the normal initial values, which do not depend on `multiple`.
      dtype: Dtype of the vectors returned; the table is float32.
      rngs: Source of the initial values.
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
        """Return the vectors (..., D) of tokens (...)."""
        return self.table(tokens)

    def without_padding(self) -> "TokenEmbedding":
        """Return a copy with V rows, which decoding uses without slicing."""
        copy = nnx.merge(*nnx.split(self))
        copy.table.embedding = nnx.Param(self.table.embedding[: self.vocab_size])
        copy.table.num_embeddings = self.vocab_size
        return copy

    def output_weight(self, dtype: Any) -> jax.Array:
        """Return the weight of the logits, which a loop of steps reads once, before the loop.

        On a CPU it is (V, D), because slicing the table copies less than slicing the logits. On accelerators it
        includes the padding, because matrix units need aligned sizes and the slice of the logits is fused with
        the operations that read them.
        """
        rows = self.vocab_size if platform() == "cpu" else None
        return self.table.embedding[:rows].astype(dtype)

    def logits(self, x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Return the logits (..., V) float32 of x (..., D), its product with the table (Press & Wolf 2017).

        `nnx.Embed.attend` would round the logits to the compute dtype.

        Args:
          x: (..., D).
          weight: The result of `output_weight`, if it was computed before.
        """
        weight = self.output_weight(x.dtype) if weight is None else weight
        return float32_product("...d,vd->...v", x, weight)[..., : self.vocab_size]
