import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.largest import largest, log_total


@pytest.mark.parametrize("size", [7, 100, 1009, 4096])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_it_equals_top_k(rng, size, k, batch):
    x = jnp.asarray(rng.normal(size=(*batch, size)), jnp.float32)
    for ours, theirs in zip(largest(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("size", [1009, 1024])
def test_of_equal_values_the_first_come_first(rng, size):
    x = jnp.asarray(rng.integers(0, 4, (11, size)), jnp.float32)
    np.testing.assert_array_equal(largest(x, 5)[1], jax.lax.top_k(x, 5)[1])


def test_nothing_but_minus_infinity():
    x = jnp.full((2, 1009), -jnp.inf).at[1, 1000].set(3.0)
    assert largest(x, 2)[1][1, 0] == 1000
    assert (largest(x, 2)[1] < 1009).all()


def test_log_total(rng):
    x = rng.normal(size=(3, 17)) * 30
    expected = np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_total(jnp.asarray(x), x.max(-1, keepdims=True)), expected, rtol=1e-6)
