"""Pooling of the states of texts against NumPy, also for rows with padding only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.text_pooling import POOLINGS, pool, pool_packed, scale_to_unit_length

B, T, D = 3, 7, 5
LENGTHS = (7, 2, 0)
REDUCTIONS = {"first": lambda x: x[0], "mean": lambda x: x.mean(axis=0), "max": lambda x: x.max(axis=0)}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_text_a_row(rng, pooling):
    states = rng.normal(size=(B, T, D)).astype(np.float32)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    vectors = pool(jnp.asarray(states), jnp.asarray(real), pooling)
    for row, length in enumerate(LENGTHS[:2]):
        np.testing.assert_allclose(vectors[row], REDUCTIONS[pooling](states[row, :length]), atol=1e-6)
    if pooling != "first":
        np.testing.assert_array_equal(vectors[2], 0)

    def loss(states):
        # What a head makes of a row of padding may be large, but counts nothing.
        own = (pool(states, jnp.asarray(real), pooling) @ jnp.full((D, 1), 50.0))[:, 0] ** 2
        return (own * jnp.array([1.0, 1.0, 0.0])).sum()

    gradient = jax.grad(loss)(jnp.asarray(states))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[2], 0)
    assert np.abs(gradient[:2]).max() > 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_several_texts_a_row(rng, pooling):
    states = rng.normal(size=(1, T, D)).astype(np.float32)
    segments = jnp.array([[1, 1, 2, 3, 3, 3, 0]])
    found = pool_packed(jnp.asarray(states), segments, pooling, 3)
    for place, (first, last) in enumerate([(0, 2), (2, 3), (3, 6)]):
        np.testing.assert_allclose(found[0, place], REDUCTIONS[pooling](states[0, first:last]), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(scale_to_unit_length(found), axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(scale_to_unit_length(jnp.zeros((2, D))), 0)
