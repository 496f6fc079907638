import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.float32_product import float32_product


def operands_of_products(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield id(equation), [x.aval for x in equation.invars]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from operands_of_products(inner)


def test_float32_is_the_usual_product(rng):
    x, y = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    np.testing.assert_array_equal(float32_product("td,vd->tv", x, y), jnp.einsum("td,vd->tv", x, y))


@pytest.mark.parametrize("spec", ["td,vd->tv", "...d,vd->...v"])
def test_low_precision_has_a_float32_result_and_products_of_low_precision(rng, spec):
    x, y = (jnp.asarray(rng.normal(size=(size, 5)), jnp.bfloat16) for size in (3, 7))
    cotangent = jnp.asarray(rng.normal(size=(3, 7)), jnp.float32)

    def total(x, y):
        output = float32_product(spec, x, y)
        assert output.dtype == jnp.float32
        return (output * cotangent).sum()

    gradients = jax.grad(total, argnums=(0, 1))(x, y)
    rounded = cotangent.astype(jnp.bfloat16).astype(jnp.float32)
    expected = rounded @ y.astype(jnp.float32), rounded.T @ x.astype(jnp.float32)
    for ours, reference in zip(gradients, expected, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), reference, rtol=2**-7, atol=1e-6)
    operands = dict(operands_of_products(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, y).jaxpr))
    assert len(operands) == 3
    assert {x.dtype for pair in operands.values() for x in pair} == {jnp.dtype(jnp.bfloat16)}
    _, tangent = jax.jvp(total, (x, y), (x, y))
    np.testing.assert_allclose(tangent, 2 * total(x, y), rtol=1e-5)
    hessian = jax.hessian(lambda x: float32_product(spec, x, y).sum() ** 2)(x)
    assert bool(jnp.isfinite(hessian.astype(jnp.float32)).all())
