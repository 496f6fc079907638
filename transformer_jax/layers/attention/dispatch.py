"""The one attention function that models call: it checks shapes and picks the fastest form for the platform."""

import math
from typing import Any

import jax

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.kernels import (
    kernel_attention,
    kernel_of,
    prepared,
    refusal,
    report_refusal,
)
from transformer_jax.layers.attention.plain import plain_attention
from transformer_jax.layers.attention.ring import ring_attention, ring_size
from transformer_jax.layers.attention.ring_kernels import ring_kernel_attention
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.compute_options import Attention
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.positions.bias import PositionBias

# Weights that "auto" holds at most, a head and a sentence: 2,048 queries by 2,048 keys on a CPU. Accelerators
# have kernels, and take the plain form for what is smaller than a block of theirs.
_HELD, _HELD_BY_ACCELERATORS = 2_048**2, 256**2


def form_of_attention(implementation: Attention, queries: int, keys: int) -> Attention:
    """What "auto" is for so many queries and keys where no kernel takes them; another one stays what it is."""
    if implementation not in ("auto", "fused"):
        return implementation
    cut = queries > 1 and ring_size(queries, keys) > 1  # over devices: the whole weights would be gathered
    held = _HELD if platform() == "cpu" else _HELD_BY_ACCELERATORS
    return "chunked" if cut or (queries > 1 and queries * keys > held) else "plain"


def kernel_for(implementation: Attention, queries: int) -> str | None:
    """The kernel to ask for so many queries, or None."""
    return kernel_of(platform()) if implementation in ("auto", "fused") and queries > 1 else None


def prepare_mask(
    whole: jax.Array | Visibility | PositionBias | None,
    implementation: Attention,
    queries: int,
    keys: int,
    dtype: str,
) -> Any:
    """A mask or bias as all layers of a model will want it: as an array, for a kernel, or for chunks as it is.

    Args:
      whole: the mask or bias.
      implementation: see `ComputeOptions.attention`.
      queries, keys: T and S.
      dtype: compute dtype of the model.
    """
    if whole is None or isinstance(whole, jax.Array):
        return whole
    if isinstance(whole, Visibility) and kernel_for(implementation, queries) is not None:
        return prepared(whole, queries, keys, dtype)
    return whole if form_of_attention(implementation, queries, keys) == "chunked" else whole.dense()


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | Visibility | KernelMask | None = None,
    bias: jax.Array | PositionBias | None = None,
    scale: float | None = None,
    return_weights: bool = False,
    implementation: Attention = "auto",
    weight_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
):
    """softmax(Q K^T * scale + bias) V (Vaswani et al. 2017, equation 1), with grouped key/value heads.

    Args:
      query: (B, T, H, K).
      key: (B, S, G, K), H a multiple of G; query head h reads group h // (H // G) (Ainslie et al. 2023).
      value: (B, S, G, any width).
      mask: boolean, broadcastable to (B, H, T, S), True = may attend, or relations that say so. A query
        that may attend to nothing gets exact zeros and zero gradients.
      bias: added to the scaled logits, broadcastable to (B, H, T, S), or positions that it follows from.
      scale: factor of the logits; None is 1 / sqrt(K).
      return_weights: also return the weights; the plain form is used then.
      implementation: see `ComputeOptions.attention`.
      weight_dropout: rate on the weights; no kernel is used where it is on. The chunked form drops the same
        places as the plain one.
      dropout_key: dropout is on where given.

    Returns:
      output (B, T, H, width) in the query's dtype, or (output, weights (B, H, T, S) float32).

    Raises:
      ValueError: ranks, batch sizes, widths or head counts that do not fit each other.
    """
    _check_shapes(query, key, value)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    drops = weight_dropout > 0 and dropout_key is not None
    if not return_weights:
        T, S = query.shape[1], key.shape[1]
        form, parts = form_of_attention(implementation, T, S), ring_size(T, S)
        if kernel := kernel_for(implementation, T):
            refused = refusal(kernel, query, key, value, mask, bias, drops=drops, parts=parts)
            if refused is None:
                assert not isinstance(mask, jax.Array), "kernels refuse it"
                attend_by = ring_kernel_attention if parts > 1 else kernel_attention
                return attend_by(kernel, query, key, value, mask=mask, scale=scale)
            if implementation == "fused" or refused.startswith(("head width", "dtype", "values")):
                report_refusal(kernel, refused, form)
        if form == "chunked":
            attend = ring_attention if parts > 1 else chunked_attention
            return attend(
                query, key, value, mask=_relations(mask), bias=bias, scale=scale,
                weight_dropout=weight_dropout, dropout_key=dropout_key if drops else None,
            )  # fmt: skip
    mask = mask.dense() if isinstance(mask, (Visibility, KernelMask)) else mask
    bias = bias.dense() if isinstance(bias, PositionBias) else bias
    dropped = (lambda weights: dropout(weights, weight_dropout, dropout_key)) if drops else None
    output, weights = plain_attention(query, key, value, mask, bias, scale, dropped)
    return (output, weights) if return_weights else output


def _relations(mask: jax.Array | Visibility | KernelMask | None) -> jax.Array | Visibility | None:
    return mask.relations if isinstance(mask, KernelMask) else mask


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(f"attention needs (B, T, H, K) arrays, got {shapes}")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"attention needs one batch size, got {shapes}")
    if key.shape[1:3] != value.shape[1:3] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key and value must share length and heads, query and key the head width; got {shapes}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {shapes}")
