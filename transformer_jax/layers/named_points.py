"""The one place where a model's main values carry a name.

Rematerialisation policies, activation sharding, inspection and patching all use these names;
model files only call `named`. Where a model has several of a kind, `jax.named_scope` says which one it is:
`interpretability.activations` knows the weights of a translator's last kind of attention as
"decoder/cross_attention/weights".
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.distributed.mesh import ROWS, SEQUENCE, constrained

EMBEDDING = "embedding"  # the stream in front of the first block, (B, T, D)
BLOCK_INPUT = "block_input"  # the stream that enters a block, (B, T, D)
RESIDUAL = "residual"  # the stream after a block, (B, T, D)
WEIGHTS = "weights"  # attention weights of the plain form, (B, H, T, S) float32
KERNEL_RESULTS = "kernel_results"  # what an attention kernel keeps for its backward pass
HEADS = "heads"  # the values that each head mixes, (B, T, H, K)
ATTENTION_OUTPUT = "attention_output"  # what attention adds to the stream, before dropout, (B, T, D)
FEED_FORWARD_OUTPUT = "feed_forward_output"  # what the feed-forward layer adds to it, (B, T, D)
STATES = "states"  # a recurrent layer's outputs, (B, T, H)

# What kinds of attention a block has, as scopes.
SELF_ATTENTION, CROSS_ATTENTION = "self_attention", "cross_attention"

# Where propagation alone goes wrong: parameters that are sharded over `fsdp` would have the stream sharded
# along its width, and every block gather its rows.
_SHARDED = {RESIDUAL: (ROWS, SEQUENCE, None)}


def named(x: jax.Array, name: str) -> jax.Array:
    """Returns `x` itself, known to JAX's transformations by `name` and sharded over the mesh, if any."""
    x = checkpoint_name(x, name)
    return constrained(x, _SHARDED[name]) if name in _SHARDED else x
