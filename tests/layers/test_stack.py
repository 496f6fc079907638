"""A stack that is compiled as for accelerators equals that of a CPU bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers import stack
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.stack import run_stack

LAYERS, WIDTH = 3, 8


def block_function(block, x, key):
    x = x + jnp.tanh(x @ block["kernel"].astype(x.dtype)) * block["scale"].astype(x.dtype)
    return x, jnp.sum(x, axis=-1)


def blocks():
    draws = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(draws.normal(0, 0.3, (LAYERS, WIDTH, WIDTH)), jnp.float32),
        "scale": jnp.asarray(draws.normal(1, 0.1, (LAYERS, WIDTH)), jnp.float32),
        "count": jnp.ones((LAYERS, 2, 2), jnp.int32),
    }


def function_of(remat):
    compute = ComputeOptions(remat=remat, unroll=1)

    def function(kernel, x):
        return run_stack(block_function, blocks() | {"kernel": kernel}, x, None, compute)

    return function


@pytest.mark.parametrize("remat", ["none", "blocks"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_and_derivatives_are_those_of_a_cpu(monkeypatch, dtype, remat):
    kernel = blocks()["kernel"]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, WIDTH)), dtype)

    def everything():
        function = function_of(remat)
        out, pullback = jax.vjp(function, kernel, x)
        forward = jax.jvp(function, (kernel, x), (kernel, x))
        batched = jax.vmap(function, (0, None))(jnp.stack([kernel, -kernel]), x)
        return out, pullback(jax.tree.map(jnp.ones_like, out)), forward, batched

    expected = everything()
    monkeypatch.setattr(stack, "platform", lambda: "tpu")
    for ours, reference in zip(jax.tree.leaves(everything()), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == reference.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(reference))


@pytest.mark.parametrize(("dtype", "products"), [(jnp.float32, 0), (jnp.bfloat16, 1)])
def test_only_matrices_that_are_cast_are_multiplied(monkeypatch, dtype, products):
    """Integers, vectors and matrices of the compute dtype are not multiplied by the number in the loop."""
    monkeypatch.setattr(stack, "platform", lambda: "gpu")
    x = jnp.ones((1, 2, WIDTH), dtype)
    program = jax.make_jaxpr(function_of("none"))(blocks()["kernel"], x)
    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    text = str(loop.params["jaxpr"])
    assert text.count(f"f32[{WIDTH},{WIDTH}] = mul") == products
