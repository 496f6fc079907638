"""What the Transformer's decoder keeps between two steps, beside its own tokens."""

import jax

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.models.decoder_cache import DecoderCache


class TransformerCache(DecoderCache):
    """A decoder's cache with the source that it attends to.

    Attributes:
      memory: per layer, keys and values of the source, B rows: one copy for all beams.
      memory_mask: (B, 1, 1, S) or None.
    """

    memory: tuple[KeyValueCache, ...]
    memory_mask: jax.Array | None
