import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.positions.absolute import learned_positions, segment_positions, sinusoidal_positions


def test_sinusoids_follow_the_papers_formula():
    D, positions = 14, [0, 1, 5, 511]
    expected = np.zeros((len(positions), D))
    for row, position in zip(expected, positions, strict=True):
        for i in range(D // 2):
            angle = position / 10_000 ** (2 * i / D)
            row[2 * i], row[2 * i + 1] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoidal_positions(jnp.array(positions), D), expected, atol=5e-5)


def test_wavelength_is_read():
    ours = sinusoidal_positions(jnp.array([3]), 4, max_wavelength=100.0)[0]
    np.testing.assert_allclose(ours, [np.sin(3), np.cos(3), np.sin(0.3), np.cos(0.3)], atol=1e-6)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="even width, got 7"):
        sinusoidal_positions(jnp.arange(3), 7)


def test_learned_positions_are_rows_of_the_table():
    table = jnp.arange(15.0).reshape(5, 3)
    np.testing.assert_array_equal(learned_positions(jnp.array([[2, 0]]), table), [[[6, 7, 8], [0, 1, 2]]])


def test_segment_positions():
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 0]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 0]]
