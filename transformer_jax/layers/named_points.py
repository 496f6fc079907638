"""The one place where a model's main values carry a name.

Rematerialisation policies, activation sharding, looking inside and patching all hang on these names;
model files only call `named`.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.mesh import ROWS, SEQUENCE, constrained

RESIDUAL = "residual"  # the stream after a block, (B, T, D)
ATTENTION_OUTPUT = "attention_output"  # what attention adds to it, before dropout, (B, T, D)
FEED_FORWARD_OUTPUT = "feed_forward_output"  # what the feed-forward layer adds to it, (B, T, D)

# Where propagation alone goes wrong: parameters that are cut over `fsdp` would have the stream cut along its
# width, and every block gather its rows.
_CUT = {RESIDUAL: (ROWS, SEQUENCE, None)}


def named(x: jax.Array, name: str) -> jax.Array:
    """Returns `x` itself, known to JAX's transformations by `name`, and cut over the mesh if there is one."""
    x = checkpoint_name(x, name)
    return constrained(x, _CUT[name]) if name in _CUT else x
