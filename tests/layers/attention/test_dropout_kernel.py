"""The kernel with dropout, interpreted on a CPU, against the plain form with the same dropped weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import others_soak
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.program_flops import program_flops, program_work
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.kernels import kernel_attention
from transformer_jax.layers.dropout import random_words

B, T, H, K = 2, 37, 4, 8
RATE = 0.3
SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (B, T)), axis=1))
MASKS = {
    "none": None,
    "causal": visibility.causal(T, T),
    "window": visibility.window(T, T, before=18, after=2),
    "documents": visibility.causal(T, T) & visibility.same_segment(SEGMENTS, SEGMENTS),
    "lengths": visibility.real(jnp.asarray([5, T]), T),
    "no key": visibility.real(jnp.asarray([0, 20]), T),
}


def inputs(kv_heads=H, queries=T, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = (B, queries, H, K), (B, T, kv_heads, K), (B, T, kv_heads, K)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def kernel(*arrays, mask=None, seed=3, rate=RATE):
    return kernel_attention(
        "splash", *arrays, mask=mask, scale=K**-0.5, weight_dropout=rate, interpret=True,
        words=random_words(jax.random.key(seed)),
    )  # fmt: skip


def plain(*arrays, mask=None, seed=3, rate=RATE):
    return dot_product_attention(
        *arrays, mask=mask, implementation="plain", weight_dropout=rate, dropout_key=jax.random.key(seed)
    )


def output_and_gradients(attend, arrays, mask):
    def loss(*arrays):
        output = attend(*arrays, mask=mask)
        return jnp.sin(output.astype(jnp.float32)).sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return output, *gradients


@pytest.mark.parametrize("name", others_soak(MASKS, "none", "documents", "no key"))
def test_output_and_gradients_equal_the_plain_form(name):
    pairs = zip(
        *(output_and_gradients(attend, inputs(), MASKS[name]) for attend in (kernel, plain)), strict=True
    )
    for value, expected in pairs:
        np.testing.assert_allclose(value, expected, atol=5e-6)


def test_grouped_heads_other_lengths_and_bfloat16():
    arrays = inputs(kv_heads=2, queries=20, dtype=jnp.bfloat16)
    single = [x.astype(jnp.float32) for x in arrays]
    pairs = zip(
        output_and_gradients(kernel, arrays, None), output_and_gradients(plain, single, None), strict=True
    )
    for value, expected in pairs:
        assert value.dtype == jnp.bfloat16
        np.testing.assert_allclose(value.astype(jnp.float32), expected, atol=0.03)


def test_dropped_weights_follow_the_key_and_the_rate():
    """With equal logits and values that are one, an output is the kept share of keys divided by 1 - rate."""
    query, key, value = inputs()
    outputs = [
        kernel(query * 0, key, jnp.ones_like(value), seed=seed, rate=rate)
        for seed, rate in ((0, RATE), (1, RATE), (0, 1e-9))
    ]
    assert float(outputs[0].mean()) == pytest.approx(1, abs=0.05)
    assert float(jnp.abs(outputs[0] - outputs[1]).max()) > 0.05
    np.testing.assert_allclose(outputs[2], 1, rtol=1e-6)


@pytest.mark.parametrize("axes", ["data=2,tensor=4", "data=2,fsdp=2,tensor=2"])
def test_a_mesh_drops_the_same_weights(axes):
    arrays = [jnp.concatenate([x, x[::-1]]) for x in inputs()]
    mask = visibility.same_segment(*(jnp.concatenate([SEGMENTS, SEGMENTS]),) * 2)
    expected = output_and_gradients(plain, arrays, mask)
    mesh = make_mesh(axes)
    with on_mesh(mesh):
        values = output_and_gradients(kernel, arrays, mask)
    for value, reference in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)


def test_operations_are_counted_by_formula():
    """Two products forward; the backward pass computes three for queries and four for keys and values."""
    x = jax.ShapeDtypeStruct((B, 128, H, K), jnp.float32)
    forward = jax.make_jaxpr(functools.partial(kernel, mask=None))(x, x, x)
    product = 2 * B * H * 128 * 128 * K
    assert program_flops(forward) == 2 * product
    gradient = jax.make_jaxpr(jax.grad(lambda *arrays: kernel(*arrays).sum(), argnums=(0, 1, 2)))(x, x, x)
    assert program_flops(gradient) == 9 * product
    assert program_work(gradient).model == 6 * product, "three products of the backward pass repeat others"
