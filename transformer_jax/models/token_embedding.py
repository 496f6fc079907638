"""The token embedding of a model's config."""

from typing import Any

from flax import nnx

from transformer_jax.layers.embedding import TokenEmbedding


def token_embedding(config: Any, *, std: float, rngs: nnx.Rngs, width: int | None = None) -> TokenEmbedding:
    """Create a token embedding (V, D).

    Args:
      config: Its `vocab_size`, `width`, `vocab_multiple` and `dtype` are read.
      std: Standard deviation of the initial values.
      rngs: Source of the initial values.
      width: Width of the embedding; None means the config's.
    """
    return TokenEmbedding(
        config.vocab_size,
        config.width if width is None else width,
        multiple=config.vocab_multiple,
        std=std,
        dtype=config.dtype,
        rngs=rngs,
    )
