"""Position schemes as modules with one interface: terms of embeddings and logits, and a rotation."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from transformer_jax.layers.positions.absolute import learned_positions, sinusoidal_positions
from transformer_jax.layers.positions.configs import (
    Alibi,
    Bucketed,
    Learned,
    NoPositions,
    Rotary,
    Shaw,
    Sinusoidal,
)
from transformer_jax.layers.positions.relative import alibi_bias, bucketed_bias
from transformer_jax.layers.positions.rotary import RotaryScaling, Rotation, rotary_frequencies, rotation


class PositionScheme(nnx.Module):
    """A scheme without positions; each subclass overrides one of the three methods."""

    # True if `bias` returns an array.
    biases = False

    def add_to(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the embeddings (B, T, D) with a term for positions (T,) or (B, T)."""
        return x

    def rotation(self, positions: jax.Array) -> Rotation | None:
        """Return the rotation of queries and keys at these positions, or None."""
        return None

    def bias(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array | None:
        """Return the bias on the logits of every layer, broadcastable to (B, H, T, S), or None."""
        return None


class SinusoidalPositions(PositionScheme):
    """Sines and cosines, added to the embeddings (Vaswani et al. 2017, section 3.5).

    Args:
      scale: Factor of the sinusoids; with size 1 they would dominate small initial embeddings such as GPT-2's.
    """

    def __init__(self, *, scale: float):
        self.scale = scale

    def add_to(self, x, positions):
        """Return the embeddings with sinusoids added."""
        return x + (self.scale * sinusoidal_positions(positions, x.shape[-1])).astype(x.dtype)


class LearnedPositions(PositionScheme):
    """A trained vector for each position, added to the embeddings (Radford et al. 2018).

    Args:
      max_length: Number of positions.
      width: D.
      std: Standard deviation of the initial values.
      rngs: Source of the initial values.
    """

    def __init__(self, max_length: int, width: int, *, std: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal(std)
        self.table = nnx.Embed(max_length, width, embedding_init=init, rngs=rngs)

    def add_to(self, x, positions):
        """Return the embeddings with rows of the table added."""
        return x + learned_positions(positions, self.table.embedding[...]).astype(x.dtype)


class RotaryPositions(PositionScheme):
    """Queries and keys rotated by their position (Su et al. 2021); see `rotary_frequencies`."""

    def __init__(self, head_width: int, *, theta: float, scaling: RotaryScaling | None):
        self.head_width, self.theta, self.scaling = head_width, theta, scaling

    def rotation(self, positions):
        """Return the rotation at these positions."""
        frequencies = rotary_frequencies(self.head_width, theta=self.theta, scaling=self.scaling)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return rotation(positions, frequencies, magnitude=magnitude)


class LinearBiasPositions(PositionScheme):
    """ALiBi: logits fall linearly with the distance (Press et al. 2022)."""

    biases = True

    def __init__(self, heads: int):
        self.heads = heads

    def bias(self, query_positions, key_positions):
        """Return the linear biases, see `alibi_bias`."""
        return alibi_bias(self.heads, query_positions, key_positions)


class BucketedPositions(PositionScheme):
    """T5's trained bias for each head and bucket of distances, shared by the layers (Raffel et al. 2020)."""

    biases = True

    def __init__(self, heads: int, *, buckets: int, max_distance: int, std: float, rngs: nnx.Rngs):
        self.bias_table = nnx.Embed(buckets, heads, embedding_init=nnx.initializers.normal(std), rngs=rngs)
        self.max_distance = max_distance

    def bias(self, query_positions, key_positions):
        """Return the trained biases, see `bucketed_bias`."""
        table = self.bias_table.embedding[...]
        return bucketed_bias(
            table, query_positions, key_positions, max_distance=self.max_distance, bidirectional=False
        )


def make_positions(config: Any, *, std: float, rngs: nnx.Rngs) -> PositionScheme:
    """Create the position scheme of a decoder's config.

    Args:
      config: A config with `positions`, `max_length`, `width` and `heads`.
      std: Standard deviation of the initial values of trained positions.
      rngs: Source of the initial values.
    """
    match config.positions:
        case Learned():
            return LearnedPositions(config.max_length, config.width, std=std, rngs=rngs)
        case Sinusoidal():
            return SinusoidalPositions(scale=2**0.5 * std)  # the initial size of the embeddings
        case Rotary(theta=theta, scaling=scaling):
            return RotaryPositions(config.width // config.heads, theta=theta, scaling=scaling)
        case Alibi():
            return LinearBiasPositions(config.heads)
        case Bucketed(buckets=buckets, max_distance=limit):
            return BucketedPositions(config.heads, buckets=buckets, max_distance=limit, std=std, rngs=rngs)
        case Shaw() | NoPositions():
            # Shaw's tables belong to the attention of each layer; see `SelfAttention`.
            return PositionScheme()
    raise ValueError(f"positions {config.positions!r} is not an instance of `Positions`")
