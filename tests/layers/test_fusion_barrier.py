import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.fusion_barrier import materialised


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_identity_and_so_is_its_gradient(rng, dtype):
    x = jnp.asarray(rng.normal(size=(3, 5)), dtype)
    np.testing.assert_array_equal(jax.jit(materialised)(x), x)
    gradient = jax.jit(jax.grad(lambda x: (materialised(x) ** 2).astype(jnp.float32).sum()))(x)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), np.asarray(2 * x, np.float32), rtol=1e-2)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_special_values_pass(special):
    x = jnp.array([[special, 1.0]])
    np.testing.assert_array_equal(jax.jit(materialised)(x), x)


def test_empty_arrays_pass():
    assert materialised(jnp.zeros((0, 3))).shape == (0, 3)


def test_dense_equals_dot_general_with_gradients(rng):
    x, w = (
        jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32),
        jnp.asarray(rng.normal(size=(5, 7)), jnp.float32),
    )
    numbers = (((2,), (0,)), ((), ()))

    def loss(product):
        return jax.value_and_grad(lambda x, w: (product(x, w, numbers) ** 3).sum(), argnums=(0, 1))(x, w)

    ours, theirs = loss(dense_dot_general), loss(jax.lax.dot_general)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
