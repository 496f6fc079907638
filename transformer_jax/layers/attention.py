"""Scaled dot-product attention, the one dispatch that every model calls, and multi-head attention."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.distributed.mesh import platform
from transformer_jax.layers.attention_kernels import (
    kernel_attention,
    kernel_of,
    prepared,
    refusal,
    report_refusal,
)
from transformer_jax.layers.chunked_attention import chunked_attention
from transformer_jax.layers.compute_options import Attention
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.fusion_barrier import materialised
from transformer_jax.layers.kernel_mask import KernelMask
from transformer_jax.layers.named_points import HEADS, WEIGHTS, named
from transformer_jax.layers.position_bias import PositionBias
from transformer_jax.layers.ring_attention import ring_attention, ring_size
from transformer_jax.layers.ring_kernels import ring_kernel_attention
from transformer_jax.layers.visibility import Visibility

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
    output, weights = _plain_attention(query, key, value, mask, bias, scale, dropped)
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


def masked_softmax(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Softmax over the last axis, in float32, that gives zeros where nothing is allowed.

    Subtracting the row's maximum keeps exp finite; masked places are zeroed after exp, so that a row
    without any allowed place sums to 0 rather than to S, and its gradient is 0 rather than NaN.
    """
    logits = logits.astype(jnp.float32)
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    unnormalised = jnp.where(mask, jnp.exp(shifted), 0.0)
    total = unnormalised.sum(axis=-1, keepdims=True)
    return unnormalised / jnp.where(total == 0.0, 1.0, total)


def _plain_attention(query, key, value, mask, bias, scale, dropped=None):
    B, T, H, K = query.shape
    S, G = key.shape[1:3]
    query = query * jnp.asarray(scale, query.dtype)
    # One token of a cache that lies in the order of these products.
    alone = T == 1 and G == H
    if not alone:
        # Heads in front of tokens, as the products want them: from the other order XLA's CPU backend made
        # copies that took as long as the products, and of unmasked weights twice that.
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    if alone:
        logits = float32_product("bthk,bshk->bhts", query, key)
    elif G == H:
        logits = float32_product("bhtk,bhsk->bhts", query, key)
    else:
        logits = float32_product("bgrtk,bgsk->bgrts", query.reshape(B, G, H // G, T, K), key)
        logits = logits.reshape(B, H, T, S)
    if bias is not None:
        logits = logits + bias
    weights = named(masked_softmax(logits, mask), WEIGHTS)
    mixing = (weights if dropped is None else dropped(weights)).astype(value.dtype)
    if alone:
        return float32_product("bhts,bshv->bthv", mixing, value).astype(query.dtype), weights
    if G == H:
        output = float32_product("bhts,bhsv->bhtv", mixing, value)
    else:
        output = float32_product("bgrts,bgsv->bgrtv", mixing.reshape(B, G, H // G, T, S), value)
        output = output.reshape(B, H, T, value.shape[-1])
    return jnp.swapaxes(output, 1, 2).astype(query.dtype), weights


class KeyValueCache(flax.struct.PyTreeNode):
    """Keys and values of the tokens seen so far, in a buffer of fixed length.

    W beams of a sentence share its row: the buffer then holds W entries for each position, next to each
    other, and a mask says which of them are a beam's own history. Beams change places by changing the
    mask; no key is moved.

    The length is the last axis in memory: the products of one-token steps read the cache in this order,
    and would otherwise copy all of it into this order at every step.

    Attributes:
      keys, values: (B, G, K, S), filled up to the number of tokens seen.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array) -> "KeyValueCache":
        """A full cache of keys and values (B, S, G, K)."""
        return cls(jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 3))

    @classmethod
    def empty(cls, rows: int, length: int, kv_heads: int, head_width: int, dtype: Any) -> "KeyValueCache":
        """Room for `length` tokens of each of the B rows."""
        buffer = jnp.zeros((rows, kv_heads, head_width, length), dtype)
        return cls(buffer, buffer)

    @property
    def key(self) -> jax.Array:
        """(B, S, G, K)."""
        return jnp.moveaxis(self.keys, 3, 1)

    @property
    def value(self) -> jax.Array:
        """(B, S, G, K)."""
        return jnp.moveaxis(self.values, 3, 1)

    @property
    def length(self) -> int:
        """The number of entries S that it has room for."""
        return self.keys.shape[3]

    def append(self, key: jax.Array, value: jax.Array, at: jax.Array) -> "KeyValueCache":
        """The cache with N new tokens (B, N, G, K) written from position `at` on.

        Where there are W times the cache's rows, they are the beams of each sentence.
        """
        beams = key.shape[0] // self.keys.shape[0]

        def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(-1, beams, *new.shape[1:])  # (B, W, N, G, K) -> (B, G, K, N W)
            new = new.transpose(0, 3, 4, 2, 1).reshape(*buffer.shape[:3], -1).astype(buffer.dtype)
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, at * beams, axis=3)

        # Stored before it is read: XLA's CPU backend would fuse the writing into each of its readers, and copy
        # the whole cache for each of them in every step.
        return KeyValueCache(materialised(write(self.keys, key)), materialised(write(self.values, value)))


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self, causal or cross by its arguments.

    Args:
      width: D.
      heads: H.
      kv_heads: G; H must be a multiple.
      head_width: K; None is D / H, and D must be a multiple then.
      use_bias: biases on the four projections; the paper has none.
      kernel_init: initialiser of the projections.
      output_init: of the output's, where it is another.
      dtype: compute dtype; parameters are float32.
      implementation: see `ComputeOptions.attention`.
      weight_dropout: rate on the attention weights.
      rngs: source of the initial values.

    Raises:
      ValueError: sizes that do not divide.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        head_width: int | None = None,
        use_bias: bool,
        kernel_init: nnx.initializers.Initializer,
        output_init: nnx.initializers.Initializer | None = None,
        dtype: str,
        implementation: Attention,
        weight_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        if (head_width is None and width % heads) or heads % kv_heads:
            raise ValueError(
                f"width {width} must be a multiple of heads {heads}, and heads of kv_heads {kv_heads}"
            )
        head_width = width // heads if head_width is None else head_width
        options: dict[str, Any] = dict(
            use_bias=use_bias,
            dtype=jnp.dtype(dtype),
            dot_general=dense_dot_general,
            rngs=rngs,
        )

        def projection(heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(width, (heads, head_width), kernel_init=kernel_init, **options)

        self.query, self.key, self.value = (projection(n) for n in (heads, kv_heads, kv_heads))
        self.output = nnx.LinearGeneral(
            (heads, head_width), width, axis=(-2, -1), kernel_init=output_init or kernel_init, **options
        )
        self.implementation, self.weight_dropout = implementation, weight_dropout

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values (B, S, G, K) of the sequence (B, S, D) that is attended to."""
        return self.key(x), self.value(x)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: jax.Array | Visibility | KernelMask | None = None,
        bias: jax.Array | PositionBias | None = None,
        return_weights: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attends from projected queries (B, T, H, K) to projected keys and values (B, S, G, K).

        Where the queries have a multiple of the keys' rows (beams of one sentence, next to each other),
        the rows of a group read the same keys; nothing is copied. A mask or bias is then broadcastable to
        (B, H, W T, S), for the W beams of a row after each other.

        Returns:
          (output (B, T, D), weights (B, H, T, S) float32 or None).
        """
        rows, T = query.shape[:2]
        mixed, weights = self._mixed(
            shared_rows(query, key), key, value, mask, bias, return_weights, dropout_key
        )
        weights = None if weights is None else separate_rows(weights, rows)
        return self._joined(mixed, rows, T), weights

    def _joined(self, mixed: jax.Array, rows: int, tokens: int) -> jax.Array:
        """What the heads mix together, as what attention adds to the stream (rows, tokens, D)."""
        return self.output(named(mixed.reshape(rows, tokens, *mixed.shape[2:]), HEADS))

    def _mixed(self, query, key, value, mask, bias, return_weights, dropout_key=None):
        """(values mixed by the weights (B, W T, H, K), weights (B, H, W T, S) or None)."""
        result = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            return_weights=return_weights,
            implementation=self.implementation,
            weight_dropout=self.weight_dropout,
            dropout_key=dropout_key,
        )
        return result if return_weights else (result, None)


def shared_rows(query: jax.Array, key: jax.Array) -> jax.Array:
    """Queries (B W, T, H, K) of W beams as (B, W T, H, K) beside their keys (B, S, G, K)."""
    return query.reshape(key.shape[0], -1, *query.shape[2:])


def separate_rows(weights: jax.Array, rows: int) -> jax.Array:
    """Weights (B, H, W T, S) of W beams as (B W, H, T, S), for B W `rows`."""
    B, H, _, S = weights.shape
    if rows == B:
        return weights
    return weights.reshape(B, H, rows // B, -1, S).swapaxes(1, 2).reshape(rows, H, -1, S)
