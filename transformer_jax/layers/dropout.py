"""Dropout with a mask that costs a few integer operations per element."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def random_words(dropout_key: jax.Array) -> jax.Array:
    """Return the random words (2,) uint32 of a key, the input of `keep_mask`."""
    return jax.random.bits(dropout_key, (2,), jnp.uint32)


def random_bits(words: jax.Array | tuple[jax.Array, jax.Array], indices: jax.Array) -> jax.Array:
    """Return uniform 32-bit integers for elements of these indices (...) uint32, by hashing (words, index).

    Threefry, JAX's default, costs about 100 operations per element and dominated the training step on a CPU.
    Dropout needs no cryptographic strength: two rounds of a bijective 32-bit mixer ("lowbias32", found by C.
    Wellons' search for the smallest avalanche bias) suffice. The bits depend only on the key and the index, so
    that a resumed run draws the same bits on any mesh.
    """

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    return mix(mix(indices ^ words[0]) ^ words[1])


def keep_mask(words: jax.Array | tuple[jax.Array, jax.Array], indices: jax.Array, rate: float) -> jax.Array:
    """Return True for indices (...) uint32 of elements to keep; each is dropped with probability `rate`."""
    return random_bits(words, indices) >= jnp.uint32(round(rate * 2**32))


def flat_indices(coordinates: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """Return the flat indices, modulo 2^32, of elements of an array.

    Args:
      coordinates: Integer coordinates for each axis, which are broadcast against each other.
      shape: Shape of the complete array.
    """
    indices, stride = jnp.zeros((), jnp.uint32), 1
    for coordinate, size in zip(reversed(coordinates), reversed(shape), strict=True):
        indices += coordinate.astype(jnp.uint32) * jnp.uint32(stride)
        stride = stride * size % 2**32
    return indices


def dropout(x: jax.Array, rate: float, dropout_key: jax.Array | None) -> jax.Array:
    """Set each element to zero with probability `rate` and scale the rest by 1 / (1 - rate).

    Args:
      x: (...) any float dtype.
      rate: Probability in [0, 1), exact to 2^-32.
      dropout_key: Random key, or None for evaluation, which returns `x` unchanged.

    Returns:
      An array like `x`.
    """
    if dropout_key is None or rate == 0.0:
        return x
    coordinates = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(x.ndim)]
    kept = keep_mask(random_words(dropout_key), flat_indices(coordinates, x.shape), rate)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
