import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.masks import causal_mask, padding_mask, segment_mask, window_mask


def grid(mask):
    return np.asarray(mask[0, 0], int).tolist()


def test_causal():
    assert grid(causal_mask(3, 3)) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_causal_behind_a_cache():
    assert grid(causal_mask(2, 5, first_query=2)) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]


def test_causal_with_a_start_for_each_sentence():
    mask = causal_mask(1, 4, first_query=jnp.array([0, 2]))
    assert mask.shape == (2, 1, 1, 4)
    assert np.asarray(mask[:, 0, 0], int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


def test_padding():
    mask = padding_mask(jnp.array([[1, 1, 0], [1, 0, 0]]))
    assert mask.dtype == bool
    assert np.asarray(mask[:, 0, 0], int).tolist() == [[1, 1, 0], [1, 0, 0]]


def test_segments():
    ids = jnp.array([[1, 1, 2, 3]])
    assert grid(segment_mask(ids, ids)) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_window():
    assert grid(window_mask(4, 4, before=1)) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert grid(window_mask(3, 3, before=0, after=1)) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]


def test_they_compose():
    ids = jnp.array([[1, 1, 2]])
    mask = causal_mask(3, 3) & segment_mask(ids, ids) & padding_mask(jnp.array([[1, 1, 0]]))
    assert grid(mask) == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
