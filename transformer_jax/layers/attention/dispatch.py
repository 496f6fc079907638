"""The attention function that models call: it checks shapes and selects the fastest form for the platform."""

import functools
import math
from typing import Any, Literal

import jax

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.attention.banded_weights import windowed_weights
from transformer_jax.layers.attention.borders import attention_with_borders
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.kernels import (
    form_of,
    kernel_attention,
    kernel_of,
    needs_array,
    prepare_for_kernel,
    refusal,
    report_refusal,
)
from transformer_jax.layers.attention.plain import plain_attention
from transformer_jax.layers.attention.ring import ring_attention, ring_size
from transformer_jax.layers.attention.ring_kernels import ring_kernel_attention
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.attention.windowed import QUERIES, local_attention, windowed_attention
from transformer_jax.layers.attention.windowed_blocks import blocks_in_rows
from transformer_jax.layers.attention.windows import window_of
from transformer_jax.layers.compute_options import Attention
from transformer_jax.layers.dropout import dropout, random_words
from transformer_jax.layers.positions.bias import PositionBias

# Maximum number of weights per head and sentence that "auto" computes in the plain form. Accelerators have
# kernels and use the plain form only below the size of a kernel's block.
_MAX_PLAIN, _MAX_PLAIN_ON_ACCELERATORS = 2_048**2, 256**2


Form = Literal["plain", "chunked", "windowed"]


def form_of_attention(implementation: Attention, queries: int, keys: int, mask: Any = None) -> Form:
    """Return the form for a number of queries and keys and a mask, if no kernel is used."""
    if implementation == "plain":
        return "plain"
    # The plain form would gather the weights of a sequence that is sharded over devices.
    sharded = queries > 1 and ring_size(queries, keys) > 1
    window = window_of(_relations(mask)) if queries > 1 else None
    if window is not None:
        # Parts that are shorter than a window, of short texts, travel around the ring instead.
        fits = queries // ring_size(queries, keys) >= window.reach
        if (sharded and fits and queries == keys) or (not sharded and window.span + QUERIES < keys):
            return "windowed"
    if implementation == "chunked":
        return "chunked"
    maximum = _MAX_PLAIN if platform() == "cpu" else _MAX_PLAIN_ON_ACCELERATORS
    return "chunked" if sharded or (queries > 1 and queries * keys > maximum) else "plain"


def kernel_for(implementation: Attention, queries: int) -> str | None:
    """Return the name of the kernel to try for so many queries, or None."""
    return kernel_of(platform()) if implementation in ("auto", "fused") and queries > 1 else None


def prepare_mask(
    mask: jax.Array | Visibility | PositionBias | None,
    implementation: Attention,
    queries: int,
    keys: int,
    dtype: str,
) -> Any:
    """Convert a mask or bias once to the form that all layers of a model use.

    Args:
      mask: The mask or bias.
      implementation: See `ComputeOptions.attention`.
      queries: T.
      keys: S.
      dtype: Compute dtype of the model.

    Returns:
      An array, a kernel's form of the mask, or the argument itself for the chunked form.
    """
    if mask is None or isinstance(mask, jax.Array):
        return mask
    form = form_of_attention(implementation, queries, keys, mask)
    kernel = kernel_for(implementation, queries)
    if isinstance(mask, Visibility) and kernel is not None:
        if form == "windowed" and not _reads_window(kernel, mask, queries, keys):
            return mask
        return prepare_for_kernel(mask, queries, keys, dtype)
    return mask.dense() if form == "plain" else mask


def _reads_window(
    kernel: str, mask: Visibility | KernelMask, queries: int, keys: int, *, has_dropout: bool = False
) -> bool:
    """Return whether a kernel reads only the keys of the mask's window, in a sequence on one device.

    With dropout this is the package's own kernel, which reads every band.
    """
    form = form_of(mask, queries, keys)
    if form is None or ring_size(queries, keys) > 1:
        return False
    return has_dropout or kernel == "splash" or not needs_array(form, queries, keys)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | Visibility | KernelMask | None = None,
    bias: jax.Array | PositionBias | None = None,
    scale: float | None = None,
    return_weights: bool | Literal["banded"] = False,
    implementation: Attention = "auto",
    weight_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
):
    """Compute softmax(Q K^T * scale + bias) V (Vaswani et al. 2017, equation 1), with grouped key/value heads.

    Args:
      query: (B, T, H, K).
      key: (B, S, G, K), with H a multiple of G; query head h reads group h // (H // G) (Ainslie et al. 2023).
      value: (B, S, G, width), of any width.
      mask: Boolean, broadcastable to (B, H, T, S), True = may attend; or its relations. A query that may attend
        to nothing gets exact zeros and zero gradients.
      bias: Added to the scaled logits, broadcastable to (B, H, T, S); or the positions that it is computed
        from.
      scale: Factor of the logits; None means 1 / sqrt(K).
      return_weights: Also return the weights, which needs the plain form; "banded" returns those of a mask with
        a window as `BandedWeights`, in memory linear in the length.
      implementation: See `ComputeOptions.attention`.
      weight_dropout: Dropout rate on the weights. All forms and the kernel with dropout drop the same weights.
      dropout_key: Random key; dropout is on if it is passed.

    Returns:
      The output (B, T, H, width) in the query's dtype, or (output, weights (B, H, T, S) float32).

    Raises:
      ValueError: Ranks, batch sizes, widths or head counts do not match; or banded weights are requested for a
        mask without a window, or with a bias.
    """
    _check_shapes(query, key, value)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    dropout_key = dropout_key if weight_dropout > 0 else None
    has_dropout = dropout_key is not None
    if return_weights == "banded":
        relations = _relations(mask)
        if bias is not None or window_of(relations) is None:
            raise ValueError("banded weights need a mask with a window as its relations, and no bias")
        output = dot_product_attention(
            query, key, value, mask=mask, scale=scale, implementation=implementation,
            weight_dropout=weight_dropout, dropout_key=dropout_key,
        )  # fmt: skip
        return output, windowed_weights(query, key, mask=relations, scale=scale)
    if not return_weights:
        T, S = query.shape[1], key.shape[1]
        ring = ring_size(T, S)
        form = form_of_attention(implementation, T, S, None if bias is not None else mask)
        kernel = kernel_for(implementation, T)
        relations = _relations(mask)
        if form == "windowed":
            reads_window = kernel is not None and _reads_window(
                kernel, relations, T, S, has_dropout=has_dropout
            )
            if not reads_window or refusal(
                str(kernel), query, key, value, mask, bias, has_dropout=has_dropout, ring=ring
            ):
                return _attend_windows(
                    query, key, value, relations, kernel, ring, requested=implementation == "fused",
                    scale=scale, weight_dropout=weight_dropout, dropout_key=dropout_key,
                )  # fmt: skip
        if kernel is not None:
            reason = refusal(kernel, query, key, value, mask, bias, has_dropout=has_dropout, ring=ring)
            if reason is None:
                assert not isinstance(mask, jax.Array), "kernels refuse it"
                if ring > 1:
                    return ring_kernel_attention(kernel, query, key, value, mask=mask, scale=scale)
                return kernel_attention(
                    kernel, query, key, value, mask=mask, scale=scale, weight_dropout=weight_dropout,
                    words=None if dropout_key is None else random_words(dropout_key),
                )  # fmt: skip
            report_refusal(kernel, reason, form, requested=implementation == "fused")
        if form == "chunked":
            attend = ring_attention if ring > 1 else chunked_attention
            return attend(
                query, key, value, mask=_relations(mask), bias=bias, scale=scale,
                weight_dropout=weight_dropout, dropout_key=dropout_key,
            )  # fmt: skip
    mask = mask.dense() if isinstance(mask, (Visibility, KernelMask)) else mask
    bias = bias.dense() if isinstance(bias, PositionBias) else bias
    drop = (lambda weights: dropout(weights, weight_dropout, dropout_key)) if has_dropout else None
    output, weights = plain_attention(query, key, value, mask, bias, scale, drop)
    return (output, weights) if return_weights else output


def _attend_windows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Visibility,
    kernel: str | None,
    ring: int,
    *,
    requested: bool,
    **options: Any,
) -> jax.Array:
    """Compute `windowed_attention` in the form for the platform and the mesh."""
    window = window_of(mask)
    assert window is not None
    local: Any = local_attention
    if platform() != "cpu" and window.lowest <= 0 <= window.highest:
        local = functools.partial(blocks_in_rows, kernel=kernel, requested=requested)
    if ring > 1:
        by_kernel = kernel is not None and options["dropout_key"] is None
        local = functools.partial(attention_with_borders, size=ring, local=local, by_kernel=by_kernel)
    return windowed_attention(query, key, value, mask=mask, local=local, **options)


def _relations(mask: Any) -> Any:
    """Return the complete mask of a kernel's form, and any other mask as it is."""
    return mask.relations if isinstance(mask, KernelMask) else mask


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(f"attention needs (B, T, H, K) arrays, got {shapes}")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"attention needs equal batch sizes, got {shapes}")
    if key.shape[1:3] != value.shape[1:3] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key and value must share length and heads, query and key the head width; got {shapes}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {shapes}")
