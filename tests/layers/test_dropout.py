import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.dropout import dropout, flat_indices, random_bits, random_words


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_of_zeros_and_mean(rate):
    x = jnp.ones((101, 997))
    y = np.asarray(dropout(x, rate, jax.random.key(3)))
    deviation = (rate * (1 - rate) / x.size) ** 0.5
    assert abs((y == 0).mean() - rate) < 4 * deviation
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


def test_no_key_or_no_rate_leaves_the_input():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_the_mask_is_a_function_of_the_key():
    x = jnp.ones((50, 50))
    first, repeated, different = (dropout(x, 0.5, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, repeated)
    # Two independent fair masks agree in half of the elements, within 4 standard deviations.
    assert abs((np.asarray(first) == np.asarray(different)).mean() - 0.5) < 4 * 0.5 / 50


def test_neighbours_and_successive_keys_are_uncorrelated():
    masks = np.stack(
        [np.asarray(dropout(jnp.ones((128, 128)), 0.5, jax.random.key(k))) == 0 for k in range(20)]
    ).astype(float)
    centered = masks - masks.mean()
    n = centered.size
    for shift, axis in ((1, 0), (1, 1), (1, 2), (2, 2), (16, 2), (64, 1)):
        correlation = (centered * np.roll(centered, shift, axis)).mean() / centered.var()
        assert abs(correlation) < 4 / n**0.5, (shift, axis)
    # No position is dropped more often than chance over the keys.
    counts = masks.sum(0)
    assert abs(counts.var() - 20 * 0.25) < 0.25


def test_bits_are_uniform():
    bits = np.asarray(random_bits(random_words(jax.random.key(0)), jnp.arange(1 << 18, dtype=jnp.uint32)))
    for bit in range(32):
        share = ((bits >> bit) & 1).mean()
        assert abs(share - 0.5) < 4 * 0.5 / 512, bit


def test_numbers_count_the_elements_of_an_array():
    shape = (3, 5, 7)
    indices = jnp.array([1, 2])[:, None, None], jnp.array([0, 4])[:, None], jnp.arange(2, 7)
    expected = np.arange(np.prod(shape)).reshape(shape)[1:3, [0, 4], 2:7]
    np.testing.assert_array_equal(flat_indices(indices, shape), expected)
    # Modulo 2^32 in arrays that are larger.
    far = flat_indices([jnp.array(70_000), jnp.array(3)], (100_000, 100_000))
    assert int(far) == (70_000 * 100_000 + 3) % 2**32
