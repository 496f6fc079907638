"""Names of a model's main values.

Rematerialization policies, activation sharding, inspection and patching use these names; model files only call
`named`. If a model has several values of a name, `jax.named_scope` distinguishes them: in
`interpretability.activations` the weights of a translator's cross-attention are
"decoder/cross_attention/weights".
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.distributed.mesh import ROWS, SEQUENCE, constrained

EMBEDDING = "embedding"  # the residual stream before the first block, (B, T, D)
BLOCK_INPUT = "block_input"  # the residual stream before a block, (B, T, D)
RESIDUAL = "residual"  # the residual stream after a block, (B, T, D)
WEIGHTS = "weights"  # attention weights of the plain form, (B, H, T, S) float32
KERNEL_RESULTS = "kernel_results"  # residuals of an attention kernel for its backward pass
HEADS = "heads"  # weighted sums of the values of each head, (B, T, H, K)
ATTENTION_OUTPUT = "attention_output"  # output of an attention sublayer before dropout, (B, T, D)
FEED_FORWARD_OUTPUT = "feed_forward_output"  # output of a feed-forward sublayer before dropout, (B, T, D)
STATES = "states"  # outputs of a recurrent layer, (B, T, H)

# Scopes of a block's attention sublayers.
SELF_ATTENTION, CROSS_ATTENTION = "self_attention", "cross_attention"

# Values that need a constraint: parameters sharded over `fsdp` would otherwise propagate to the width of the
# residual stream, and every block would gather its rows.
_SHARDED = {RESIDUAL: (ROWS, SEQUENCE, None)}


def named(x: jax.Array, name: str) -> jax.Array:
    """Return `x`, named for JAX's transformations and sharded over the mesh, if there is one."""
    x = checkpoint_name(x, name)
    return constrained(x, _SHARDED[name]) if name in _SHARDED else x
