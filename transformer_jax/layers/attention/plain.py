"""Scaled dot-product attention as the paper writes it, one product, one softmax and one product."""

import jax
import jax.numpy as jnp

from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.named_points import WEIGHTS, named


def plain_attention(query, key, value, mask, bias, scale, dropped=None):
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
