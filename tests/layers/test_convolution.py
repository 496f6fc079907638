import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.layers.convolution import conv_general_dilated

AXES = ("NHWC", "HWIO", "NHWC")


def plain(x, kernel, padding):
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=AXES)


def own(x, kernel, padding):
    return conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=AXES)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(0, 2), (1, 0)]])
@pytest.mark.parametrize("rows", [16, 12, 3])
def test_it_and_its_derivatives_are_those_of_jax(rng, rows, padding):
    x, other_x = (jnp.asarray(rng.normal(size=(rows, 7, 6, 3)), jnp.float32) for _ in range(2))
    kernel, other = (jnp.asarray(rng.normal(size=(3, 2, 3, 5)), jnp.float32) for _ in range(2))
    expected, back = jax.vjp(lambda *operands: plain(*operands, padding), x, kernel)
    found, own_back = jax.vjp(lambda *operands: own(*operands, padding), x, kernel)
    np.testing.assert_array_equal(found, expected)
    cotangent = jnp.asarray(rng.normal(size=expected.shape), jnp.float32)
    for one, two in zip(own_back(cotangent), back(cotangent), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    moved = [jax.jvp(lambda *o, f=f: f(*o, padding), (x, kernel), (other_x, other)) for f in (own, plain)]
    np.testing.assert_allclose(moved[0][1], moved[1][1], rtol=1e-5, atol=1e-5)
    several = jnp.stack([kernel, other])

    def of_kernel(convolution):
        return jax.grad(lambda kernel: jnp.square(convolution(x, kernel, padding)).sum())

    for one, two in zip(*(jax.vmap(of_kernel(f))(several) for f in (own, plain)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-3)
    moved = [jax.jvp(of_kernel(f), (kernel,), (other,))[1] for f in (own, plain)]
    np.testing.assert_allclose(*moved, rtol=1e-4, atol=1e-3)


def test_it_is_fitted_in_half_precision(rng):
    x = jnp.asarray(rng.normal(size=(512, 6, 6, 3)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 3, 4)), jnp.bfloat16)
    found = jax.grad(lambda k: own(x, k, "SAME").astype(jnp.float32).sum())(kernel)
    exact = jax.grad(lambda k: plain(x.astype(jnp.float32), k, "SAME").sum())(kernel.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2**-7, atol=2**-4)


def program(rows, platform):
    x, kernel = jnp.zeros((rows, 8, 8, 3)), jnp.zeros((3, 3, 3, 4))
    step = jax.jit(jax.grad(lambda k: own(x, k, "SAME").sum()))
    return step.trace(kernel).lower(lowering_platforms=(platform,)).as_text()


def test_other_platforms_and_meshes_compile_the_form_of_jax():
    assert "while" in program(16, "cpu")
    assert "while" not in program(16, "cuda")
    assert "while" not in program(15, "cpu")
    with on_mesh(make_mesh("data=8")):
        assert "while" not in program(16, "cpu")


def test_what_is_not_computed_is_refused():
    with pytest.raises(NotImplementedError, match=r"images \(B, H, W, C\)"):
        conv_general_dilated(
            jnp.zeros((1, 2, 4, 4)), jnp.zeros((4, 2, 3, 3)), (1, 1), "SAME",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip
    line = nnx.Conv(2, 4, (3,), conv_general_dilated=conv_general_dilated, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match=r"images \(B, H, W, C\)"):
        line(jnp.zeros((1, 4, 2)))
    layer = nnx.Conv(2, 4, (3, 3), strides=2, conv_general_dilated=conv_general_dilated, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="stride 1, without dilation"):
        layer(jnp.zeros((1, 4, 4, 2)))
