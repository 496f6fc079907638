import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.top_k import log_sum_exp, top_k, top_k_continuations


@pytest.mark.parametrize("size", [7, 1009, 4096])
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_top_k_equals_jax(rng, size, k, batch):
    x = jnp.asarray(rng.normal(size=(*batch, size)), jnp.float32)
    for output, expected in zip(top_k(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("size", [1009, 1024])
def test_equal_values_are_taken_in_order(rng, size):
    x = jnp.asarray(rng.integers(0, 4, (11, size)), jnp.float32)
    np.testing.assert_array_equal(top_k(x, 5)[1], jax.lax.top_k(x, 5)[1])


def test_rows_of_minus_infinity():
    x = jnp.full((2, 1009), -jnp.inf).at[1, 1000].set(3.0)
    assert top_k(x, 2)[1][1, 0] == 1000
    assert (top_k(x, 2)[1] < 1009).all()


def test_log_sum_exp(rng):
    x = rng.normal(size=(3, 17)) * 30
    expected = np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_sum_exp(jnp.asarray(x), x.max(-1, keepdims=True)), expected, rtol=1e-6)


@pytest.mark.parametrize("V", [5, 1009, 4096])
@pytest.mark.parametrize("k", [1, 10])
def test_continuations_equal_a_complete_sort(rng, V, k):
    logits = rng.normal(size=(3, 4, V)) * 3
    scores = rng.normal(size=(3, 4))
    scores[:, 2] = -1e30  # a beam without a hypothesis yet
    totals = scores[..., None] + logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-totals.reshape(3, -1), kind="stable")[:, :k]
    sums, beams, tokens = top_k_continuations(
        jnp.asarray(logits, jnp.float32), jnp.asarray(scores, jnp.float32), k
    )
    np.testing.assert_allclose(sums, np.take_along_axis(totals.reshape(3, -1), order, 1), rtol=1e-5)
    np.testing.assert_array_equal(beams, order // V)
    np.testing.assert_array_equal(tokens, order % V)


def test_equal_continuations_are_taken_in_order():
    sums, beams, tokens = top_k_continuations(jnp.zeros((2, 3, 1009)), jnp.asarray([[0.0, 1, 1]] * 2), 5)
    np.testing.assert_array_equal(beams, [[1] * 5] * 2)
    np.testing.assert_array_equal(tokens, [range(5)] * 2)
    np.testing.assert_allclose(sums, 1 - np.log(1009), rtol=1e-6)
