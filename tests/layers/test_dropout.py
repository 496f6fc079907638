import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.dropout import dropout


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
    first, again, other = (dropout(x, 0.5, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    # Two independent fair masks agree in half the places, within 4 deviations.
    assert abs((np.asarray(first) == np.asarray(other)).mean() - 0.5) < 4 * 0.5 / 50


def test_neighbours_and_successive_keys_are_uncorrelated():
    masks = np.stack(
        [np.asarray(dropout(jnp.ones((128, 128)), 0.5, jax.random.key(k))) == 0 for k in range(20)]
    ).astype(float)
    centred = masks - masks.mean()
    n = centred.size
    for shift, axis in ((1, 0), (1, 1), (1, 2), (2, 2), (16, 2), (64, 1)):
        correlation = (centred * np.roll(centred, shift, axis)).mean() / centred.var()
        assert abs(correlation) < 4 / n**0.5, (shift, axis)
    # No position is dropped more often than chance over the keys.
    counts = masks.sum(0)
    assert abs(counts.var() - 20 * 0.25) < 0.25


def test_bits_are_uniform():
    from transformer_jax.layers.dropout import _mixed_bits

    bits = np.asarray(_mixed_bits(jax.random.key(0), (1 << 18,)))
    for bit in range(32):
        share = ((bits >> bit) & 1).mean()
        assert abs(share - 0.5) < 4 * 0.5 / 512, bit
