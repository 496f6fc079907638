"""A softmax that is computed while keys are read, part by part (Milakov & Gimelshein 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.layers.float32_product import float32_product


class RunningSoftmax(NamedTuple):
    """An attention over the keys read so far, for queries (B, G, R, t) in groups of R heads that share keys.

    Attributes:
      maximum: (B, G, R, t) largest logit so far.
      total: (B, G, R, t) sum of exp(logit - maximum).
      mixed: (B, G, R, t, V) sum of exp(logit - maximum) * value.
    """

    maximum: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def empty(cls, query: jax.Array, width: int) -> RunningSoftmax:
        """Return the state before any key, for queries (B, t, G, R, K) and values of this width."""
        B, t, G, R, _ = query.shape
        rows = (B, G, R, t)
        lowest = jnp.full(rows, jnp.finfo(jnp.float32).min)
        return cls(lowest, jnp.zeros(rows), jnp.zeros((*rows, width)))

    def add_keys(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array,
        bias: jax.Array | None,
        drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
    ) -> RunningSoftmax:
        """Return the state after further keys (B, s, G, K).

        Args:
          query: (B, t, G, R, K), scaled.
          key: (B, s, G, K).
          value: (B, s, G, V).
          mask: Broadcastable to (B, H, t, s).
          bias: Broadcastable to (B, H, t, s), or None.
          drop: Dropout on weights (B, G, R, t, s); the softmax's denominator includes dropped weights.
        """
        logits, mask = masked_logits(query, key, mask, bias)
        # The output is independent of this number, so it needs no gradient.
        maximum = jax.lax.stop_gradient(jnp.maximum(self.maximum, logits.max(axis=-1)))
        weights = jnp.where(mask, jnp.exp(logits - maximum[..., None]), 0.0)
        shrink = jnp.exp(jax.lax.stop_gradient(self.maximum) - maximum)
        total, mixed = shrink * self.total + weights.sum(axis=-1), shrink[..., None] * self.mixed
        return RunningSoftmax(maximum, total, mixed + weighted_values(drop(weights), value))

    def output(self) -> jax.Array:
        """Return the output (B, t, G, R, V), zeros for a query without visible keys."""
        mixed = self.mixed / self._denominator()[..., None]
        return jnp.moveaxis(mixed, 3, 1)

    def log_denominator(self) -> jax.Array:
        """Return log(sum of exp(logit)) (B, G, R, t), the lowest number for a query without visible keys."""
        return self.maximum + jnp.log(self._denominator())

    def _denominator(self) -> jax.Array:
        return jnp.where(self.total == 0.0, 1.0, self.total)


def masked_logits(
    query: jax.Array, key: jax.Array, mask: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return (logits (B, G, R, t, s) float32, the lowest number at masked pairs; the mask by group)."""
    groups = key.shape[2]
    logits = float32_product("btgrk,bsgk->bgrts", query, key)
    if bias is not None:
        logits = logits + _by_group(bias, groups)
    mask = _by_group(mask, groups)
    return jnp.where(mask, logits, jnp.finfo(jnp.float32).min), mask


def weighted_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Return the weighted sums (B, G, R, t, V) float32 of values (B, s, G, V) by weights (B, G, R, t, s)."""
    weights = weights.astype(value.dtype)
    return float32_product("bgrts,bsgv->bgrtv", weights, value)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """Reshape (B, H, t, s) to (B, G, R, t, s); a size of 1 for all heads remains 1."""
    b, heads, t, s = x.shape
    return x.reshape(b, groups if heads > 1 else 1, -1, t, s)
