"""Multi-head attention: the projections around `dot_product_attention`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.compute_options import Attention
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.named_points import HEADS, named
from transformer_jax.layers.positions.bias import PositionBias


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self, causal or cross by its arguments.

    Args:
      width: D.
      heads: H.
      kv_heads: G, a divisor of H.
      head_width: K; None means D / H, for which H must divide D.
      use_bias: Add biases to the four projections; the paper has none.
      key_bias: False for no bias of the keys, on which the weights do not depend.
      kernel_init: Initializer of the projections.
      output_init: Initializer of the output projection; None uses `kernel_init`.
      dtype: Compute dtype; parameters are float32.
      implementation: See `ComputeOptions.attention`.
      weight_dropout: Dropout rate on the attention weights.
      rngs: Source of the initial values.

    Raises:
      ValueError: The sizes do not divide each other.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        head_width: int | None = None,
        use_bias: bool,
        key_bias: bool = True,
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
            dtype=jnp.dtype(dtype),
            dot_general=dense_dot_general,
            rngs=rngs,
        )

        def projection(heads: int, use_bias: bool = use_bias) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                width, (heads, head_width), use_bias=use_bias, kernel_init=kernel_init, **options
            )

        self.query = projection(heads)
        self.key = projection(kv_heads, use_bias and key_bias)
        self.value = projection(kv_heads)
        self.output = nnx.LinearGeneral(
            (heads, head_width), width, axis=(-2, -1), use_bias=use_bias,
            kernel_init=output_init or kernel_init, **options,
        )  # fmt: skip
        self.implementation, self.weight_dropout = implementation, weight_dropout

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values (B, S, G, K) of a sequence (B, S, D) to attend to."""
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
        """Attend from projected queries to projected keys and values.

        If the queries have W times as many rows as the keys (adjacent beams of each sentence), the beams of a
        sentence read the same keys without copies. Mask and bias are then broadcastable to (B, H, W T, S), with
        the beams of a row one after another.

        Args:
          query: (B, T, H, K) or (B W, T, H, K).
          key: (B, S, G, K).
          value: (B, S, G, K).
          mask: See `dot_product_attention`.
          bias: See `dot_product_attention`.
          return_weights: Also return the attention weights.
          dropout_key: Random key; dropout on the weights is on if it is passed.

        Returns:
          (output (B, T, D), weights (B, H, T, S) float32 or None).
        """
        rows, T = query.shape[:2]
        mixed, weights = self._mix(share_rows(query, key), key, value, mask, bias, return_weights, dropout_key)
        weights = None if weights is None else separate_rows(weights, rows)
        return self._project_output(mixed, rows, T), weights

    def _project_output(self, mixed: jax.Array, rows: int, tokens: int) -> jax.Array:
        """Project the heads' mixed values to the residual stream (rows, tokens, D)."""
        return self.output(named(mixed.reshape(rows, tokens, *mixed.shape[2:]), HEADS))

    def _mix(self, query, key, value, mask, bias, return_weights, dropout_key=None):
        """Return (values mixed by the weights (B, W T, H, K), weights (B, H, W T, S) or None)."""
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


def share_rows(query: jax.Array, key: jax.Array) -> jax.Array:
    """Reshape the queries (B W, T, H, K) of W beams to (B, W T, H, K), for keys (B, S, G, K)."""
    return query.reshape(key.shape[0], -1, *query.shape[2:])


def separate_rows(weights: jax.Array, rows: int) -> jax.Array:
    """Reshape the weights (B, H, W T, S) of W beams to (B W, H, T, S), for B W `rows`."""
    B, H, _, S = weights.shape
    if rows == B:
        return weights
    return weights.reshape(B, H, rows // B, -1, S).swapaxes(1, 2).reshape(rows, H, -1, S)
