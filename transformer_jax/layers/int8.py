"""8-bit weights for decoding, a step of which is limited by reading the weights: half the bytes of bfloat16.

Each output of a layer has its own scale, the largest absolute weight divided by 127 (Jacob et al. 2018, section
2; symmetric, per channel). Activations keep their dtype: products read integers, convert them in registers, and
scale the result.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.self_attention import FusedSelfAttention
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.embedding import TokenEmbedding
from transformer_jax.layers.float32_product import float32_product

_MAX_INTEGER = 127


def quantize(weight: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return (integers int8, scales float32 with sizes of 1 along `axes`), so that weight ~ integers * scales.

    Args:
      weight: Any shape.
      axes: Axes that a product contracts.
    """
    weight = weight.astype(jnp.float32)
    maximum = jnp.abs(weight).max(axis=axes, keepdims=True)
    scales = jnp.where(maximum == 0, 1.0, maximum) / _MAX_INTEGER
    return jnp.round(weight / scales).astype(jnp.int8), scales


class Int8Dense(nnx.Module):
    """A dense layer with 8-bit weights, for inference.

    Args:
      kernel: (*inputs, *outputs).
      bias: (*outputs), or None.
      inputs: Number of input axes.
      dtype: Compute dtype.
    """

    def __init__(self, kernel: jax.Array, bias: jax.Array | None, *, inputs: int, dtype: Any):
        integers, scales = quantize(kernel, tuple(range(inputs)))
        self.input_shape, self.output_shape = kernel.shape[:inputs], kernel.shape[inputs:]
        outputs = math.prod(self.output_shape)
        self.integers = nnx.Param(integers.reshape(-1, outputs))
        self.scales = nnx.Param(scales.reshape(outputs))
        self.bias = None if bias is None else nnx.Param(bias.reshape(outputs))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to x (..., *inputs)."""
        leading = x.shape[: x.ndim - len(self.input_shape)]
        x = x.astype(self.dtype).reshape(*leading, -1)
        kernel = self.integers[...].astype(self.dtype)
        contracted = (((x.ndim - 1,), (0,)), ((), ()))
        y = dense_dot_general(x, kernel, contracted, preferred_element_type=jnp.float32) * self.scales[...]
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(self.dtype).reshape(*leading, *self.output_shape)


class Int8SelfAttention(FusedSelfAttention):
    """Self-attention whose joined projection has 8-bit weights.

    Args:
      attention: The attention that is quantized.
    """

    def __init__(self, attention: FusedSelfAttention):
        for name, value in vars(attention).items():
            if name not in ("kernel", "bias") and not name.startswith("_"):
                setattr(self, name, value)
        bias = None if attention.bias is None else attention.bias[...]
        self.projection = Int8Dense(attention.kernel[...], bias, inputs=1, dtype=attention.dtype)

    def project_all(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the queries (B, N, H, K), keys and values (B, N, G, K) of tokens (B, N, D)."""
        query, key, value = jnp.split(self.projection(x), [self.heads, self.heads + self.kv_heads], axis=2)
        return query, key, value


class Int8Embedding(nnx.Module):
    """A token embedding and output table with 8-bit rows, see `TokenEmbedding`.

    Args:
      embedding: The table that is quantized.
    """

    def __init__(self, embedding: TokenEmbedding):
        integers, scales = quantize(embedding.table.embedding[: embedding.vocab_size], (1,))
        self.integers, self.scales = nnx.Param(integers), nnx.Param(scales[:, 0])
        self.dtype, self.vocab_size = embedding.table.dtype, embedding.vocab_size

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the vectors (..., D) of tokens (...)."""
        return (self.integers[...][tokens] * self.scales[...][tokens][..., None]).astype(self.dtype)

    def output_weight(self, dtype: Any) -> None:
        """Return None: `logits` reads the integers in each step."""
        del dtype

    def logits(self, x: jax.Array, weight: None = None) -> jax.Array:
        """Return the logits (..., V) float32 of x (..., D)."""
        del weight
        return float32_product("...d,vd->...v", x, self.integers[...].astype(x.dtype)) * self.scales[...]


def with_int8_weights(model: Any) -> Any:
    """Return a copy of a causal decoder prepared by `for_decoding`, with 8-bit matrices and tables.

    Norms, biases and position tables keep their dtype.

    Args:
      model: The decoder, on one device.
    """
    copy = nnx.merge(*nnx.split(model))
    for block in copy.blocks:
        _quantize_layers(block)
    copy.embedding = Int8Embedding(copy.embedding)
    if copy.unembedding is not None:
        copy.unembedding = Int8Embedding(copy.unembedding)
    return copy


def _quantize_layers(module: nnx.Module) -> None:
    """Replace the dense layers of a module, at any depth."""
    for name, child in list(vars(module).items()):
        if isinstance(child, nnx.Linear | nnx.LinearGeneral):
            inputs = len(child.in_features) if isinstance(child, nnx.LinearGeneral) else 1
            bias = None if child.bias is None else child.bias[...]
            setattr(module, name, Int8Dense(child.kernel[...], bias, inputs=inputs, dtype=child.dtype))
        elif isinstance(child, nnx.Module):
            _quantize_layers(child)
            if isinstance(child, FusedSelfAttention):
                setattr(module, name, Int8SelfAttention(child))
