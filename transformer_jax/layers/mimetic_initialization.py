"""Initial values that make the heads of a bidirectional encoder attend to neighboring tokens."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.self_attention import SelfAttention

# Initial logit of a head at the token that it attends to: among 128 tokens that token gets about half of the
# weight, and its neighbors most of the rest.
_PEAK = 7.0
# Offsets of the tokens that heads attend to, repeated over the heads of all layers.
_OFFSETS = (-1, 1, -2, 2)


def _frequencies(width: int) -> np.ndarray:
    """Return (width / 2,) angles per token, evenly spaced over the half circle, in random order.

    Any prefix is a sample of all angles, so that a narrower network that reads only a prefix distinguishes
    positions.
    """
    half = width // 2
    return np.random.default_rng(0).permutation(math.pi * (np.arange(half) + 0.5) / half)


def sinusoids(rows: int, width: int, std: float) -> jax.Array:
    """Return a table (rows, width) of alternating sines and cosines of the row number, with RMS `std`."""
    angles = np.arange(rows)[:, None] * _frequencies(width)
    table = np.zeros((rows, width))
    table[:, : 2 * angles.shape[1]] = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(rows, -1)
    return jnp.asarray(table * math.sqrt(2) * std, jnp.float32)


def _query_and_key_kernels(
    layers: int, width: int, heads: int, head_width: int, embedding_width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return query and key kernels (L, D, H, K) whose products peak at each head's offset."""
    available = min(width, embedding_width) // 2
    pairs = min(head_width // 2, available)
    # This number of pairs of sine and cosine with amplitude sqrt(2) * scale sums to the peak times sqrt(K).
    scale = math.sqrt(_PEAK * math.sqrt(head_width) / max(1, pairs))
    frequencies = _frequencies(embedding_width)
    queries, keys = (np.zeros((layers, width, heads, head_width)) for _ in range(2))
    order = np.random.default_rng(1)
    for number in range(layers * heads):
        layer, head = divmod(number, heads)
        offset = _OFFSETS[number % len(_OFFSETS)]
        for pair, source in enumerate(order.permutation(available)[:pairs]):
            rows, columns = slice(2 * source, 2 * source + 2), slice(2 * pair, 2 * pair + 2)
            angle = frequencies[source] * offset
            rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            keys[layer, rows, head, columns] = scale * np.eye(2)
            queries[layer, rows, head, columns] = scale * rotation
    return queries, keys


def add_identity(kernel: Any) -> None:
    """Add the identity matrix, truncated to (inputs, outputs), to a dense layer's kernel."""
    inputs, outputs = kernel[...].shape
    kernel[...] = kernel[...] + jnp.eye(inputs, outputs, dtype=kernel[...].dtype)


def attend_to_neighbors(attention: SelfAttention, embedding_width: int, key: jax.Array) -> None:
    """Add values to the initial kernels of a stack's attention, in place, so that heads attend to neighbors.

    Queries match the key of the token one or two positions before or after, as far as the position table of
    `sinusoids` distinguishes positions, and each head copies its part of that token's values to the output.
    With small random values alone, neighbors reach the output through three products that nearly vanish, and a
    masked LM trained for few steps learns only word frequencies. Trockman & Kolter 2023, "Mimetic
    Initialization of Self-Attention Layers", also imitate the form of trained attention.

    Args:
      attention: Attention of a stack with kernels (L, D, H, K) and (L, H, K, D), and as many key heads as
        heads.
      embedding_width: Width of the table of `sinusoids`, of which a narrower stack reads a prefix.
      key: Random key of the permutation that assigns values to heads in each layer.

    Raises:
      ValueError: The attention has grouped heads.
    """
    L, D, H, K = attention.query.kernel[...].shape
    if attention.key.kernel[...].shape != (L, D, H, K):
        raise ValueError("the initial values for neighbors need as many key heads as query heads")
    queries, keys = _query_and_key_kernels(L, D, H, K, embedding_width)
    order = jax.vmap(lambda layer_key: jax.random.permutation(layer_key, D))(jax.random.split(key, L))
    # If all heads together are narrower than the states, the remaining values are copied by no head.
    assignment = jax.nn.one_hot(order, H * K)
    terms = {
        "query": queries,
        "key": keys,
        "value": assignment.reshape(L, D, H, K),
        "output": assignment.swapaxes(1, 2).reshape(L, H, K, D),
    }
    for name, values in terms.items():
        kernel = getattr(attention, name).kernel
        kernel[...] = kernel[...] + jnp.asarray(values, kernel[...].dtype)
