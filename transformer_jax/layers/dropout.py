"""Dropout whose mask costs a few integer operations per element."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def random_words(dropout_key: jax.Array) -> jax.Array:
    """(2,) uint32 of a key, from which `kept_at` follows."""
    return jax.random.bits(dropout_key, (2,), jnp.uint32)


def bits_at(words: jax.Array, number: jax.Array) -> jax.Array:
    """Uniform 32-bit integers of elements of these numbers (...) uint32: an integer hash of (words, number).

    Threefry, JAX's default, costs some 100 operations an element and dominated the training step on a
    CPU. Dropout needs no cryptographic strength: two rounds of a bijective 32-bit mixer ("lowbias32",
    found by C. Wellons' search for the smallest avalanche bias) over a counter suffice. The bits are a
    function of the key and the place alone, so a resumed run draws the same, however it is sharded.
    """

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    return mix(mix(number ^ words[0]) ^ words[1])


def kept_at(words: jax.Array, number: jax.Array, rate: float) -> jax.Array:
    """Whether the elements of these numbers (...) uint32 are kept; each is dropped with probability `rate`."""
    return bits_at(words, number) >= jnp.uint32(round(rate * 2**32))


def numbers_of(places: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """The numbers, modulo 2^32, of elements at `places` of an array of this shape.

    Args:
      places: of each axis, integers that are broadcast against each other.
      shape: of the complete array.
    """
    number, stride = jnp.zeros((), jnp.uint32), 1
    for place, size in zip(reversed(places), reversed(shape), strict=True):
        number += place.astype(jnp.uint32) * jnp.uint32(stride)
        stride = stride * size % 2**32
    return number


def dropout(x: jax.Array, rate: float, dropout_key: jax.Array | None) -> jax.Array:
    """Zeroes each element with probability `rate` and scales the others by 1 / (1 - rate).

    Args:
      x: (...) any float dtype.
      rate: probability in [0, 1), met to 2^-32.
      dropout_key: a key, or None for evaluation, which returns `x` unchanged.

    Returns:
      An array like `x`.
    """
    if dropout_key is None or rate == 0.0:
        return x
    places = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(x.ndim)]
    kept = kept_at(random_words(dropout_key), numbers_of(places, x.shape), rate)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
