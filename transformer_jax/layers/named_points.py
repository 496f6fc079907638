"""The one place where a model's main values carry a name.

Rematerialisation policies, activation sharding, looking inside and patching all hang on these names;
model files only call `named`.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

RESIDUAL = "residual"  # the stream after a block, (B, T, D)
ATTENTION_OUTPUT = "attention_output"  # what attention adds to it, before dropout, (B, T, D)
FEED_FORWARD_OUTPUT = "feed_forward_output"  # what the feed-forward layer adds to it, (B, T, D)


def named(x: jax.Array, name: str) -> jax.Array:
    """Returns `x` itself, known to JAX's transformations by `name`."""
    return checkpoint_name(x, name)
