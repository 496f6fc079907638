"""The result of a search, and the length penalty."""

import flax.struct
import jax


class Hypotheses(flax.struct.PyTreeNode):
    """The n best token sequences of each sentence, best first.

    Attributes:
      tokens: (B, n, T) int32, filled with the end token after the first one.
      lengths: (B, n) number of tokens, including the end token.
      scores: (B, n) log probability divided by the length penalty.
      weights: Cross-attention (B, n, L, H, T, S) float32 of each target token, or None.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array
    weights: jax.Array | None = None


def length_penalty(length: jax.Array | float, alpha: float) -> jax.Array | float:
    """Return ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14); `length` counts the end token."""
    return ((5.0 + length) / 6.0) ** alpha
