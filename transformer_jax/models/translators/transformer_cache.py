"""The cache of the Transformer's decoder."""

import jax

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.models.decoder_cache import DecoderCache


class TransformerCache(DecoderCache):
    """A decoder's cache with the source to which it attends.

    Attributes:
      memory: For each layer, keys and values of the source in B rows, one copy for all beams.
      memory_mask: (B, 1, 1, S) or None.
    """

    memory: tuple[KeyValueCache, ...]
    memory_mask: jax.Array | None
