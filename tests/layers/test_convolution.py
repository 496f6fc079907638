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


def ours(x, kernel, padding):
    return conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=AXES)


@pytest.mark.parametrize(
    ("padding", "rows"),
    [("SAME", 16), ("VALID", 12), ([(0, 2), (1, 0)], 3), ("SAME", 3), ([(0, 2), (1, 0)], 16)],
)
def test_it_and_its_derivatives_are_those_of_jax(rng, rows, padding):
    """With small integers every sum is exact in float32, so that its order does not matter."""

    def integers(*shape):
        return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)

    x, x_tangent = (integers(rows, 7, 6, 3) for _ in range(2))
    kernel, kernel_tangent = (integers(3, 2, 3, 5) for _ in range(2))
    expected, pullback = jax.vjp(lambda *operands: plain(*operands, padding), x, kernel)
    output, our_pullback = jax.vjp(lambda *operands: ours(*operands, padding), x, kernel)
    np.testing.assert_array_equal(output, expected)
    cotangent = integers(*expected.shape)
    for gradient, reference in zip(our_pullback(cotangent), pullback(cotangent), strict=True):
        np.testing.assert_array_equal(gradient, reference)
    tangents = [
        jax.jvp(lambda *o, f=f: f(*o, padding), (x, kernel), (x_tangent, kernel_tangent)) for f in (ours, plain)
    ]
    np.testing.assert_array_equal(tangents[0][1], tangents[1][1])
    kernels = jnp.stack([kernel, kernel_tangent])

    def kernel_gradient(convolution):
        return jax.grad(lambda kernel: jnp.square(convolution(x, kernel, padding)).sum())

    for gradient, reference in zip(
        *(jax.vmap(kernel_gradient(f))(kernels) for f in (ours, plain)), strict=True
    ):
        np.testing.assert_array_equal(gradient, reference)
    tangents = [jax.jvp(kernel_gradient(f), (kernel,), (kernel_tangent,))[1] for f in (ours, plain)]
    np.testing.assert_array_equal(*tangents)


def test_it_is_fitted_in_half_precision(rng):
    x = jnp.asarray(rng.normal(size=(512, 6, 6, 3)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 3, 4)), jnp.bfloat16)
    output = jax.grad(lambda k: ours(x, k, "SAME").astype(jnp.float32).sum())(kernel)
    exact = jax.grad(lambda k: plain(x.astype(jnp.float32), k, "SAME").sum())(kernel.astype(jnp.float32))
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(output.astype(jnp.float32), exact, rtol=2**-7, atol=2**-4)


def program(rows, platform):
    x, kernel = jnp.zeros((rows, 8, 8, 3)), jnp.zeros((3, 3, 3, 4))
    step = jax.jit(jax.grad(lambda k: ours(x, k, "SAME").sum()))
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
