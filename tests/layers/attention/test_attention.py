import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.oracles.attention import attention as oracle
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.masks import causal_mask
from transformer_jax.layers.attention.multi_head import MultiHeadAttention

B, T, S, H, K, W = 2, 5, 7, 6, 11, 13  # distinct sizes: a swapped axis cannot pass


def arrays(rng, groups=H, dtype=np.float32, width=W):
    shapes = (B, T, H, K), (B, S, groups, K), (B, S, groups, width)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("groups", "with_mask", "with_bias"),
    [(6, False, False), (6, True, True), (3, True, False), (2, False, True), (1, True, True)],
)
def test_equals_the_formula(rng, groups, with_mask, with_bias):
    query, key, value = arrays(rng, groups)
    mask = jnp.asarray(rng.random((B, 1, T, S)) < 0.6) if with_mask else None
    bias = jnp.asarray(rng.normal(size=(1, H, T, S)), jnp.float32) if with_bias else None
    output, weights = dot_product_attention(query, key, value, mask=mask, bias=bias, return_weights=True)
    expected, expected_weights = oracle(query, key, value, mask=mask, bias=bias)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)
    assert weights.dtype == jnp.float32
    without_weights = dot_product_attention(query, key, value, mask=mask, bias=bias)
    np.testing.assert_array_equal(without_weights, output)


def test_scale_replaces_the_square_root(rng):
    query, key, value = arrays(rng)
    output = dot_product_attention(query, key, value, scale=0.37)
    np.testing.assert_allclose(output, oracle(query, key, value, scale=0.37)[0], atol=2e-6)


@pytest.mark.parametrize("implementation", ["plain", "fused"])
def test_equals_jax(rng, implementation):
    query, key, value = arrays(rng, groups=3, width=K)
    mask = causal_mask(T, S)
    output = dot_product_attention(query, key, value, mask=mask, implementation=implementation)
    np.testing.assert_allclose(output, jax.nn.dot_product_attention(query, key, value, mask=mask), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", ["plain", "fused"])
def test_a_query_that_sees_nothing_gets_zeros_and_zero_gradients(rng, dtype, implementation):
    query, key, value = arrays(rng, dtype=dtype, width=K)
    mask = np.ones((B, 1, T, S), bool)
    mask[0, :, 2] = False

    def total(query, key, value):
        output = dot_product_attention(query, key, value, mask=jnp.asarray(mask), implementation=implementation)
        return jnp.square(output.astype(jnp.float32)).sum(), output

    gradients, output = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    np.testing.assert_array_equal(np.asarray(output[0, 2], np.float32), 0.0)
    assert np.abs(np.asarray(output[0, 1], np.float32)).min() > 0
    np.testing.assert_array_equal(np.asarray(gradients[0][0, 2], np.float32), 0.0)
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


def test_gradients_equal_finite_differences_of_the_formula(rng):
    """Along a random direction; the formula in float64, so that the differences are exact enough."""
    inputs = arrays(rng, groups=3)
    directions = arrays(rng, groups=3)
    mask, cotangent = causal_mask(T, S, first_query=1), rng.normal(size=(B, T, H, W))

    def total(query, key, value):
        return (dot_product_attention(query, key, value, mask=mask) * cotangent).sum()

    def formula(step):
        moved = [
            np.asarray(x, np.float64) + step * np.asarray(d) for x, d in zip(inputs, directions, strict=True)
        ]
        return (oracle(*moved, mask=mask)[0] * cotangent).sum()

    gradients = jax.grad(total, argnums=(0, 1, 2))(*inputs)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(slope, (formula(1e-5) - formula(-1e-5)) / 2e-5, rtol=1e-4)


def test_low_precision_output_keeps_float32_weights(rng):
    query, key, value = arrays(rng, dtype=jnp.bfloat16)
    output, weights = dot_product_attention(query, key, value, return_weights=True)
    assert output.dtype == jnp.bfloat16
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5, 6, 11), (2, 7, 4, 11), (2, 7, 4, 11)), "multiple"),
        (((2, 5, 6, 11), (3, 7, 6, 11), (3, 7, 6, 11)), "batch"),
        (((2, 5, 6, 11), (2, 7, 6, 10), (2, 7, 6, 10)), "head width"),
        (((2, 5, 6, 11), (2, 7, 6, 11), (2, 8, 6, 11)), "length"),
        (((5, 6, 11), (7, 6, 11), (7, 6, 11)), r"\(B, T, H, K\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*(jnp.zeros(shape) for shape in shapes))


def module(heads=6, kv_heads=3, use_bias=False):
    return MultiHeadAttention(
        12, heads, kv_heads, use_bias=use_bias, kernel_init=nnx.initializers.xavier_uniform(),
        dtype="float32", implementation="plain", rngs=nnx.Rngs(0),
    )  # fmt: skip


@pytest.mark.parametrize("use_bias", [False, True])
def test_multi_head_attention_equals_its_parts(rng, use_bias):
    layer = module(use_bias=use_bias)
    layer = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), layer)
    x, memory = rng.normal(size=(B, T, 12)), rng.normal(size=(B, S, 12))

    def project(part, inputs):
        projected = np.einsum("btd,dhk->bthk", inputs, np.asarray(part.kernel[...], np.float64))
        return projected + (0 if part.bias is None else np.asarray(part.bias[...], np.float64))

    mixed, _ = oracle(project(layer.query, x), project(layer.key, memory), project(layer.value, memory))
    expected = np.einsum("bthk,hkd->btd", mixed, np.asarray(layer.output.kernel[...], np.float64))
    expected += 0 if layer.output.bias is None else np.asarray(layer.output.bias[...], np.float64)
    memory32 = jnp.asarray(memory, jnp.float32)
    output, weights = layer(layer.query(jnp.asarray(x, jnp.float32)), *layer.project(memory32))
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-4)
    assert weights is None


def test_beams_of_one_sentence_read_the_same_keys(rng):
    layer, beams = module(), 4
    x = jnp.asarray(rng.normal(size=(B * beams, T, 12)), jnp.float32)
    memory = jnp.asarray(rng.normal(size=(B, S, 12)), jnp.float32)
    mask = jnp.asarray(rng.random((B, 1, 1, S)) < 0.7)
    shared = layer(layer.query(x), *layer.project(memory), mask=mask, return_weights=True)
    copied = layer(
        layer.query(x),
        *layer.project(jnp.repeat(memory, beams, axis=0)),
        mask=jnp.repeat(mask, beams, axis=0),
        return_weights=True,
    )
    np.testing.assert_allclose(shared[0], copied[0], atol=1e-6)
    np.testing.assert_allclose(shared[1], copied[1], atol=1e-6)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        module(heads=5)
