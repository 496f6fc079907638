"""Scaled dot-product attention as the paper defines it: a product, a softmax and a product."""

import jax
import jax.numpy as jnp

from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.named_points import WEIGHTS, named


def plain_attention(query, key, value, mask, bias, scale, drop=None):
    """Compute softmax(Q K^T * scale + bias) V with all weights in memory.

    Args:
      query: (B, T, H, K).
      key: (B, S, G, K).
      value: (B, S, G, V).
      mask: Boolean array, broadcastable to (B, H, T, S), or None.
      bias: Array, broadcastable to (B, H, T, S), or None.
      scale: Factor of the logits.
      drop: Dropout on the weights, or None.

    Returns:
      (output (B, T, H, V) in the query's dtype, weights (B, H, T, S) float32 before dropout).
    """
    B, T, H, K = query.shape
    S, G = key.shape[1:3]
    query = query * jnp.asarray(scale, query.dtype)
    # In a one-token step the cache already has the layout of these products.
    one_token = T == 1 and G == H
    if not one_token:
        # Heads precede tokens, because XLA's CPU backend would copy the operands for as long as the products
        # take.
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    if one_token:
        logits = float32_product("bthk,bshk->bhts", query, key)
    elif G == H:
        logits = float32_product("bhtk,bhsk->bhts", query, key)
    else:
        logits = float32_product("bgrtk,bgsk->bgrts", query.reshape(B, G, H // G, T, K), key)
        logits = logits.reshape(B, H, T, S)
    if bias is not None:
        logits = logits + bias
    weights = named(masked_softmax(logits, mask), WEIGHTS)
    mixing = (weights if drop is None else drop(weights)).astype(value.dtype)
    if one_token:
        return float32_product("bhts,bshv->bthv", mixing, value).astype(query.dtype), weights
    if G == H:
        output = float32_product("bhts,bhsv->bhtv", mixing, value)
    else:
        output = float32_product("bgrts,bgsv->bgrtv", mixing.reshape(B, G, H // G, T, S), value)
        output = output.reshape(B, H, T, value.shape[-1])
    return jnp.swapaxes(output, 1, 2).astype(query.dtype), weights


def masked_softmax(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Compute a softmax over the last axis in float32, with zeros for masked entries and fully masked rows.

    Subtracting the row's maximum keeps exp finite. Masked entries are set to zero after exp, so that a fully
    masked row sums to 0 instead of S, and its gradient is 0 instead of NaN.
    """
    logits = logits.astype(jnp.float32)
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    unnormalized = jnp.where(mask, jnp.exp(shifted), 0.0)
    total = unnormalized.sum(axis=-1, keepdims=True)
    return unnormalized / jnp.where(total == 0.0, 1.0, total)
