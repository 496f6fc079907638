import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.kernel_pooling import KERNELS, distances, gaussian_scores, kernel_pooling

T, S, D, C = 5, 13, 3, 2

FORMULAS = {
    "gaussian": lambda u: np.exp(-(u**2) / 2),
    "boxcar": lambda u: float(u <= 1),
    "epanechnikov": lambda u: max(0.0, 0.75 * (1 - u**2)),
    "constant": lambda u: 1.0,
}


@pytest.fixture
def points(rng):
    return tuple(rng.normal(size=shape) for shape in ((T, D), (S, D), (S, C)))


def single(*arrays):
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


@pytest.mark.parametrize("width", [0.4, 1.7, np.array([0.5, 2.0, 1.1])])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_weighted_mean_is_the_formula(points, kernel, width):
    query, key, value = points
    query[0] += 50.0  # far from all
    means, weights = kernel_pooling(*single(*points), kernel=kernel, width=width)
    for t in range(T):
        shares = np.array([FORMULAS[kernel](np.linalg.norm((query[t] - k) / width)) for k in key])
        if not shares.any():
            if kernel != "gaussian":  # whose weights are too small for a number, not 0
                np.testing.assert_array_equal(weights[t], np.zeros(S))
                np.testing.assert_array_equal(means[t], np.zeros(C))
            continue
        np.testing.assert_allclose(weights[t], shares / shares.sum(), atol=1e-5)
        np.testing.assert_allclose(means[t], shares @ value / shares.sum(), atol=1e-5)


def test_far_from_all_the_gaussian_takes_the_nearest(points):
    query, key, value = single(*points)
    means, _ = kernel_pooling(query + 50.0, key, value, kernel="gaussian", width=0.1)
    nearest = np.asarray(distances(query + 50.0, key)).argmin(axis=1)
    np.testing.assert_allclose(means, value[nearest], atol=1e-5)


@pytest.mark.parametrize("width", [0.5, 1.0, D**0.25])
def test_normalised_keys_and_a_gaussian_are_dot_product_attention(points, width):
    """The bridge: softmax(Q K^T / width^2) V, and at a width of D^1/4 the Transformer's own scale."""
    query, key, value = single(*points)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    means, weights = kernel_pooling(query, key, value, kernel="gaussian", width=width)
    np.testing.assert_allclose(
        weights, jax.nn.softmax(gaussian_scores(query, key, width=width), axis=-1), atol=1e-6
    )
    scale = None if width == D**0.25 else width**-2
    attended = dot_product_attention(
        query[None, :, None], key[None, :, None], value[None, :, None], scale=scale
    )
    np.testing.assert_allclose(means, attended[0, :, 0], atol=1e-6)


def test_keys_of_unequal_length_break_the_bridge(points):
    query, key, _ = single(*points)
    _, weights = kernel_pooling(query, key, jnp.ones((S, 1)), kernel="gaussian", width=1.0)
    assert np.abs(weights - jax.nn.softmax(gaussian_scores(query, key, width=1.0), axis=-1)).max() > 0.05


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_finite_where_points_coincide(kernel):
    def total(x, width):
        means, _ = kernel_pooling(x, x, x, kernel=kernel, width=width)
        return jnp.square(means).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.ones((4, D)), jnp.asarray(0.7))
    assert all(np.isfinite(g).all() for g in gradients)


def test_a_mask_leaves_examples_out(points):
    query, key, value = single(*points)
    mask = jnp.arange(S) < 4
    means, _ = kernel_pooling(query, key, value, kernel="gaussian", width=1.0, mask=mask[None])
    without_rest, _ = kernel_pooling(query, key[:4], value[:4], kernel="gaussian", width=1.0)
    np.testing.assert_allclose(means, without_rest, atol=1e-6)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), np.array([1.0, 0.0, 1.0])])
def test_a_width_of_nothing_is_refused(points, width):
    with pytest.raises(ValueError, match="must be above 0"):
        kernel_pooling(*single(*points), kernel="gaussian", width=width)


def test_an_unknown_kernel(points):
    with pytest.raises(ValueError, match="kernel 'cosine' is not one of gaussian, boxcar"):
        kernel_pooling(*single(*points), kernel="cosine", width=1.0)
