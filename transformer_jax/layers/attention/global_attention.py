"""Self-attention within a window, with global tokens that have projections of their own (Longformer)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.cache import KeyValueCache
from transformer_jax.layers.attention.plain import masked_softmax
from transformer_jax.layers.attention.self_attention import SelfAttention
from transformer_jax.layers.attention.visibility import gather_rows
from transformer_jax.layers.attention.windowed import replace_rows
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.float32_product import float32_product


class GlobalContext(NamedTuple):
    """Mask of all tokens and positions of the global ones, shared by all layers.

    Attributes:
      mask: The window and the global keys; see `dot_product_attention`.
      tokens: (B, g) positions of global tokens, -1 for none; None if there are none.
      visible: (B, 1, g or 1, T) tokens that each global token sees; None means all.
    """

    mask: Any
    tokens: jax.Array | None = None
    visible: jax.Array | None = None


class LongformerAttention(SelfAttention):
    """Attention within a window and of global tokens to all others (Beltagy et al. 2020, section 3.1).

    Every token attends to the tokens in its window and to the global tokens. The output of a global token is
    replaced by an attention to all tokens, with separate projections.

    Args:
      width: See `SelfAttention`.
      heads: See `SelfAttention`.
      kv_heads: See `SelfAttention`.
      rngs: Source of the initial values.
      **options: See `SelfAttention`.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(width, heads, kv_heads, rngs=rngs, **options)
        names = ("use_bias", "kernel_init", "dtype")
        linear: dict[str, Any] = {name: options[name] for name in names}
        linear["dtype"] = jnp.dtype(linear["dtype"])

        def projection() -> nnx.LinearGeneral:
            return nnx.LinearGeneral(width, (heads, width // heads), rngs=rngs, **linear)

        self.global_query, self.global_key, self.global_value = (projection() for _ in range(3))

    def fused(self) -> SelfAttention:
        """Return this module, which has no form with a single product."""
        return self

    def attend(
        self,
        x: jax.Array,
        context: Any,
        *,
        cache: KeyValueCache | None = None,
        at: jax.Array | None = None,
        return_weights: Any = False,
        dropout_key: jax.Array | None = None,
    ):
        """Attend from tokens (B, T, D) to each other.

        Args:
          x: The tokens.
          context: See `GlobalContext`.
          cache: None, because an encoder has no cache.
          at: None, because an encoder has no cache.
          return_weights: Also return the attention weights; "global" returns those of the global tokens only.
          dropout_key: Random key; dropout on the weights is on if it is passed.

        Returns:
          (output (B, T, D), (weights (B, H, T, T) or (B, H, g, T) float32, or None, None)).
        """
        assert cache is None, "an encoder has no cache"
        local_key, global_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        rows, T = x.shape[:2]
        dense = bool(return_weights) and return_weights != "global"
        mixed, weights = self._mix(*self.project_all(x), context.mask, None, dense, local_key)
        if context.tokens is not None:
            output, of_globals = self._attend_globally(x, context, global_key)
            mixed = replace_rows(mixed, context.tokens, output)
            if dense:
                by_row = jnp.swapaxes(weights, 1, 2)
                by_row = replace_rows(by_row, context.tokens, jnp.swapaxes(of_globals, 1, 2))
                weights = jnp.swapaxes(by_row, 1, 2)
            elif return_weights:
                weights = of_globals
        return self._project_output(mixed, rows, T), (weights, None)

    def _attend_globally(
        self, x: jax.Array, context: GlobalContext, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (mixed values (B, g, H, K) of the global tokens, their weights (B, H, g, T) before dropout).

        Few global tokens need neither the keys nor the values of all tokens: with W the projection of the keys,
        q (x W)^T is (q W^T) x^T, and weights times (x W + b) are (weights x) W + b times their sum.
        """
        assert context.tokens is not None
        query = self.global_query(gather_rows(x, context.tokens))
        query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
        x = x.astype(query.dtype)
        g, H = query.shape[1:3]
        projects_queries = g * H <= x.shape[2]
        if projects_queries:
            kernel = self.global_key.kernel[...].astype(query.dtype)
            # The bias of the keys would add the same number to all logits of a query.
            by_input = jnp.einsum("bghk,dhk->bghd", query, kernel)
            logits = float32_product("bghd,btd->bhgt", by_input, x)
        else:
            logits = float32_product("bghk,bthk->bhgt", query, self.global_key(x))
        weights = masked_softmax(logits, context.visible)
        mixing = dropout(weights, self.weight_dropout, dropout_key)
        if not projects_queries:
            return jnp.einsum("bhgt,bthk->bghk", mixing.astype(x.dtype), self.global_value(x)), weights
        mixed = jnp.einsum("bhgt,btd->bghd", mixing.astype(x.dtype), x)
        values = jnp.einsum("bghd,dhk->bghk", mixed, self.global_value.kernel[...].astype(x.dtype))
        if self.global_value.bias is not None:
            total = jnp.swapaxes(mixing.sum(axis=3), 1, 2)[..., None].astype(x.dtype)
            values = values + total * self.global_value.bias[...].astype(x.dtype)
        return values, weights
