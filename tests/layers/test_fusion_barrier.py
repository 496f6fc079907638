import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.distributed.mesh import make_mesh
from transformer_jax.layers import dense
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.fusion_barrier import materialize, materialize_cotangent


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_identity_and_so_is_its_gradient(rng, dtype):
    x = jnp.asarray(rng.normal(size=(3, 5)), dtype)
    np.testing.assert_array_equal(jax.jit(materialize)(x), x)
    gradient = jax.jit(jax.grad(lambda x: (materialize(x) ** 2).astype(jnp.float32).sum()))(x)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), np.asarray(2 * x, np.float32), rtol=1e-2)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_special_values_pass(special):
    x = jnp.array([[special, 1.0]])
    np.testing.assert_array_equal(jax.jit(materialize)(x), x)


def test_empty_arrays_pass():
    assert materialize(jnp.zeros((0, 3))).shape == (0, 3)


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


@pytest.mark.parametrize("contracted", [((1,), (0,)), ((0,), (0,))])
def test_one_row_on_a_gpu(rng, monkeypatch, contracted):
    """A single row (1, 5) is padded along its first axis, and a vector (5,) has no axis to pad."""
    monkeypatch.setattr(dense, "platform", lambda: "gpu")
    x = jnp.asarray(rng.normal(size=(1, 5) if contracted[0] == (1,) else (5,)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)
    numbers = (contracted, ((), ()))
    program = jax.make_jaxpr(dense_dot_general, static_argnums=2)(x, w, numbers)
    assert ("pad" in str(program)) == (contracted[0] == (1,))
    np.testing.assert_allclose(dense_dot_general(x, w, numbers), jax.lax.dot_general(x, w, numbers), rtol=1e-5)


def branches(function, *arguments, platform="cpu"):
    """Return the number of barriers in the program of a platform."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("stablehlo.case")


def both_modes(function):
    def derivatives(x):
        return jax.value_and_grad(function)(x), jax.jvp(function, (x,), (x,))

    return derivatives


def test_barriers_at_values_tangents_and_cotangents():
    x = jnp.ones((3, 5))

    def loss(barrier, x):
        return jnp.sin(barrier(jnp.sin(x))).sum()

    def counts(barrier):
        value = functools.partial(loss, barrier)
        tangent = functools.partial(jax.jvp, value, (x,))
        return [branches(value, x), branches(jax.grad(value), x), branches(lambda t: tangent((t,)), x)]

    assert counts(materialize) == [1, 2, 2]
    assert counts(materialize_cotangent) == [0, 1, 0]
    assert branches(jax.vmap(lambda x: materialize(jnp.sin(x))), x) == 1
    assert branches(jax.checkpoint(lambda x: materialize(jnp.sin(x))), x) == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_compile_no_trace_of_it(platform):
    x = jnp.ones((3, 5, 7))

    def lowered(product):
        def loss(x):
            return (product(x, jnp.ones((7, 5)), (((2,), (0,)), ((), ()))) ** 3).sum()

        # Both programs need the same name and no source locations to be equal as text.
        derivatives = jax.jit(both_modes(loss))
        return derivatives.trace(x).lower(lowering_platforms=(platform,)).as_text()

    assert branches(both_modes(lambda x: materialize(x).sum()), x, platform=platform) == 0
    assert lowered(dense_dot_general) == lowered(jax.lax.dot_general)


def test_second_derivatives_in_every_order(rng):
    x = jnp.asarray(rng.normal(size=5), jnp.float32)

    def loss(x):
        return jnp.sin(materialize_cotangent(materialize(x) ** 3)).sum()

    expected = jnp.diag(6 * x * jnp.cos(x**3) - 9 * x**4 * jnp.sin(x**3))
    for outer in (jax.jacfwd, jax.jacrev):
        for inside in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(outer(inside(loss)))(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_equals_its_rows(rng, axis):
    x = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
    function = both_modes(lambda x: (materialize(x) ** 3).sum())
    results = jax.jit(jax.vmap(function, in_axes=axis))(x)
    expected = [function(row) for row in (x.T if axis else x)]
    for n, each in enumerate(expected):
        jax.tree.map(lambda a, b, n=n: np.testing.assert_allclose(a[n], b, rtol=1e-5), results, each)


@pytest.mark.parametrize("checked", [True, False])
def test_in_a_loop_that_is_rematerialised_on_each_device(rng, checked):
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    rows = jax.sharding.PartitionSpec("data")

    def total(barrier, x):
        @jax.checkpoint
        def step(x, _):
            return jnp.sin(barrier(x)), None

        return jax.lax.scan(step, x, length=3)[0]

    def loss(x):
        mesh = make_mesh("data=8")
        local = functools.partial(total, materialize)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=checked)
        return mapped(x).sum()

    results = jax.jit(both_modes(loss))(x)
    expected = both_modes(lambda x: total(lambda x: x, x).sum())(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, expected)


@pytest.mark.parametrize("x", [jnp.arange(3), jnp.array([True, False]), np.float32(2.0)])
def test_integers_masks_and_numbers_pass(x):
    np.testing.assert_array_equal(materialize(x), x)
    np.testing.assert_array_equal(jax.jit(materialize)(x), x)
    assert jax.grad(lambda y: y * materialize(x).sum())(1.0) == x.sum()
