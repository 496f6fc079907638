"""Initial values with which the heads of a bidirectional encoder attend to neighbouring tokens."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.self_attention import SelfAttention

# The largest logit of a head at first, at the token that it attends to: of 128 tokens it gets about half of
# the weight, the tokens beside it most of the rest.
_PEAK = 7.0
# How far heads attend: one token back, one ahead, two back, two ahead, and so on, over the heads of all layers.
_OFFSETS = (-1, 1, -2, 2)


def _frequencies(width: int) -> np.ndarray:
    """(width / 2,) angles per token, evenly over the half circle, in an order without a trend.

    The first ones are a sample of all, so that a narrower network that reads only these tells places apart.
    """
    half = width // 2
    return np.random.default_rng(0).permutation(math.pi * (np.arange(half) + 0.5) / half)


def sinusoids(rows: int, width: int, std: float) -> jax.Array:
    """(rows, width) sines and cosines of the rows' numbers in turn, with root mean square `std`."""
    angles = np.arange(rows)[:, None] * _frequencies(width)
    table = np.zeros((rows, width))
    table[:, : 2 * angles.shape[1]] = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(rows, -1)
    return jnp.asarray(table * math.sqrt(2) * std, jnp.float32)


def _query_and_key_kernels(
    layers: int, width: int, heads: int, head_width: int, embedding_width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Query and key kernels (L, D, H, K) whose products peak at each head's offset."""
    readable = min(width, embedding_width) // 2
    pairs = min(head_width // 2, readable)
    # As many pairs of sine and cosine of amplitude sqrt(2) * scale add up to the peak times sqrt(K).
    scale = math.sqrt(_PEAK * math.sqrt(head_width) / max(1, pairs))
    frequencies = _frequencies(embedding_width)
    queries, keys = (np.zeros((layers, width, heads, head_width)) for _ in range(2))
    order = np.random.default_rng(1)
    for number in range(layers * heads):
        layer, head = divmod(number, heads)
        offset = _OFFSETS[number % len(_OFFSETS)]
        for place, source in enumerate(order.permutation(readable)[:pairs]):
            rows, columns = slice(2 * source, 2 * source + 2), slice(2 * place, 2 * place + 2)
            angle = frequencies[source] * offset
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            keys[layer, rows, head, columns] = scale * np.eye(2)
            queries[layer, rows, head, columns] = scale * turn
    return queries, keys


def add_identity(kernel: Any) -> None:
    """Adds the identity (inputs, outputs), cut to its size, to a dense layer's kernel."""
    inputs, outputs = kernel[...].shape
    kernel[...] = kernel[...] + jnp.eye(inputs, outputs, dtype=kernel[...].dtype)


def attend_to_neighbours(attention: SelfAttention, embedding_width: int, key: jax.Array) -> None:
    """Changes the initial values of a stack's attention, in place.

    Added to the random values: queries are the keys of the token one or two places before or behind, as far as
    the position table of `sinusoids` tells places apart; each head hands its share of that token's values on as
    they are. With small random values alone a token's neighbours reach the output through three products that
    nearly vanish, and a masked LM of few steps learns frequencies of words, and no more. In the manner of
    Trockman & Kolter 2023, "Mimetic Initialization of Self-Attention Layers", who give trained attention's form
    to its first values.

    Args:
      attention: of a stack: kernels (L, D, H, K) and (L, H, K, D), with as many key heads as heads.
      embedding_width: of the table of `sinusoids`, whose first values the stack reads where it is narrower.
      key: of the shares, a permutation of the values in each layer.

    Raises:
      ValueError: grouped heads.
    """
    L, D, H, K = attention.query.kernel[...].shape
    if attention.key.kernel[...].shape != (L, D, H, K):
        raise ValueError("neighbours are found by as many heads of keys as of queries")
    queries, keys = _query_and_key_kernels(L, D, H, K, embedding_width)
    order = jax.vmap(lambda one: jax.random.permutation(one, D))(jax.random.split(key, L))
    # Where heads are narrower together than the states, what is left over is handed on by none.
    shares = jax.nn.one_hot(order, H * K)
    added = {
        "query": queries,
        "key": keys,
        "value": shares.reshape(L, D, H, K),
        "output": shares.swapaxes(1, 2).reshape(L, H, K, D),
    }
    for name, values in added.items():
        kernel = getattr(attention, name).kernel
        kernel[...] = kernel[...] + jnp.asarray(values, kernel[...].dtype)
