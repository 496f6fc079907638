"""Dropout whose mask costs a few integer operations per element."""

import jax
import jax.numpy as jnp


def _mixed_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform 32-bit integers: an integer hash of (key, element number).

    Threefry, JAX's default, costs some 100 operations an element and dominated the training step on a
    CPU. Dropout needs no cryptographic strength: two rounds of a bijective 32-bit mixer ("lowbias32",
    found by C. Wellons' search for the smallest avalanche bias) over a counter suffice. The bits are a
    function of the key and the place alone, so a resumed run draws the same, however it is sharded.
    """

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    words = jax.random.bits(key, (2,), jnp.uint32)
    counter = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        counter += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    return mix(mix(counter ^ words[0]) ^ words[1])


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
    kept = _mixed_bits(dropout_key, x.shape) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
