"""Longformer: windows, global tokens, weights and long rows over several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.sharding import model_shardings
from transformer_jax.layers.attention.global_attention import GlobalContext, LongformerAttention
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.encoders.longformer import (
    LongformerClassifier,
    LongformerConfig,
    LongformerMaskedLM,
    question_tokens,
)
from transformer_jax.parameter_names import named_leaves

SIZES = dict(vocab_size=53, width=24, layers=2, heads=4, feed_forward=37, max_length=640, window=8,
             dropout=0.0, attention_dropout=0.0)  # fmt: skip
B, T = 2, 40


def make(module=LongformerMaskedLM, **changes):
    return jax.jit(lambda: module(LongformerConfig(**(SIZES | changes)), rngs=nnx.Rngs(0)))()


def tokens_of(length=T):
    return jnp.asarray(np.random.default_rng(0).integers(5, 53, (B, length)))


def test_a_state_depends_on_the_window_of_each_layer():
    """Two layers of a window of 8 reach eight tokens on each side; a global token connects all of them."""
    model, tokens = make(), tokens_of()
    changed = tokens.at[:, 20].set((tokens[:, 20] + 1) % 53)
    apply = jax.jit(lambda tokens, **marks: model.hidden_states(tokens, **marks))

    def reached(**marks):
        difference = jnp.abs(apply(tokens, **marks) - apply(changed, **marks)).max(axis=(0, 2))
        return np.flatnonzero(difference > 0)

    np.testing.assert_array_equal(reached(), np.arange(12, 29))
    np.testing.assert_array_equal(reached(global_tokens=jnp.zeros((B, 1), jnp.int32)), np.arange(T))


@pytest.mark.parametrize("count", [2, 9])
def test_global_tokens_equal_the_formula(count):
    """Few global tokens avoid the keys and values of all tokens, many do not; both equal NumPy's attention."""
    rng = np.random.default_rng(1)
    attention = LongformerAttention(
        24, 4, 4, use_bias=True, kernel_init=nnx.initializers.normal(0.5), dtype="float32",
        implementation="auto", rngs=nnx.Rngs(0),
    )  # fmt: skip
    for part in (attention.global_key, attention.global_value, attention.global_query):
        part.bias[...] = jnp.asarray(rng.normal(size=part.bias[...].shape), jnp.float32)
    x = rng.normal(size=(B, T, 24)).astype(np.float32)
    positions = np.stack([rng.permutation(T)[:count] for _ in range(B)])
    positions[1, -1] = -1
    visible = np.arange(T) < np.array([T, 17])[:, None]
    context = GlobalContext(None, jnp.asarray(positions), jnp.asarray(visible)[:, None, None])
    values, weights = attention._attend_globally(jnp.asarray(x), context, None)

    def project(part, x):
        return np.einsum("td,dhk->thk", x, np.asarray(part.kernel[...])) + np.asarray(part.bias[...])

    for row in range(B):
        real = x[row, visible[row]]
        key, value = project(attention.global_key, real), project(attention.global_value, real)
        for n, position in enumerate(positions[row]):
            if position < 0:
                continue
            query = project(attention.global_query, x[row, position : position + 1])[0] / np.sqrt(6)
            logits = np.einsum("hk,thk->ht", query, key)
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(weights[row, :, n, : len(real)], shares, atol=2e-6)
            np.testing.assert_allclose(values[row, n], np.einsum("ht,thk->hk", shares, value), atol=2e-5)


def test_weights_of_global_tokens_are_rows_of_the_dense_weights():
    model, tokens = make().encoder, tokens_of()
    marks = dict(global_tokens=jnp.array([[0, 30], [5, -1]]), mask=jnp.array([T, 25]))
    _, dense = model.hidden_states(tokens, return_weights=True, **marks)
    _, of_globals = model.hidden_states(tokens, return_weights="global", **marks)
    assert dense.shape == (B, 2, 4, T, T)
    assert of_globals.shape == (B, 2, 4, 2, T)
    np.testing.assert_allclose(dense.sum(axis=-1), 1, atol=1e-5)
    for row, n, position in ((0, 0, 0), (0, 1, 30), (1, 0, 5)):
        np.testing.assert_array_equal(of_globals[row, :, :, n], dense[row, :, :, position])
    local = np.asarray(dense)[0, :, :, 15]
    visible = np.flatnonzero(local.max(axis=(0, 1)))
    np.testing.assert_array_equal(visible, [0, *range(11, 20), 30])


@pytest.mark.long
def test_long_rows_over_several_devices_equal_one():
    """The windowed form in training, with gradients, padding and a global token."""
    tokens, mask = tokens_of(640), jnp.array([640, 301])
    model = make(LongformerClassifier, classes=3)

    def loss(model, tokens):
        return jnp.square(model(tokens, mask=mask)).sum()

    expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(model, tokens)
    mesh = make_mesh("sequence=4,data=2")
    with on_mesh(mesh):
        sharded = jax.device_put(model, model_shardings(model, mesh))
        value, gradient = jax.jit(jax.value_and_grad(loss))(sharded, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for path, leaf in named_leaves(gradient).items():
        np.testing.assert_allclose(leaf, named_leaves(expected_gradient)[path], atol=2e-5, err_msg=path)


@pytest.mark.long
def test_the_windowed_form_equals_the_plain_one_in_the_model():
    tokens, config = tokens_of(640), LongformerConfig(**SIZES)
    marks = dict(mask=jnp.array([640, 301]), global_tokens=jnp.array([[0, 600], [7, -1]]))

    @functools.partial(jax.jit, static_argnums=0)
    def logits(compute):
        return LongformerMaskedLM(config, rngs=nnx.Rngs(0), compute=compute)(tokens, **marks)

    windowed, plain = (logits(ComputeOptions(attention=form)) for form in ("auto", "plain"))
    real = np.arange(640) < np.array([640, 301])[:, None]
    np.testing.assert_allclose(windowed[real], plain[real], atol=2e-5)


def test_questions_are_global():
    tokens = jnp.array([[0, 7, 8, 2, 2, 9, 2], [0, 5, 2, 2, 9, 9, 2]])
    np.testing.assert_array_equal(question_tokens(tokens, 2, 4), [[0, 1, 2, -1], [0, 1, -1, -1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(window=7), "window=7 must be an even number of at least 2"),
        (dict(window=0), "window=0 must be an even number"),
        (dict(global_tokens=0), "global_tokens=0 must be at least 1"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LongformerConfig(**(SIZES | changes))


def test_more_global_tokens_than_the_config_allows():
    model = make(global_tokens=3)
    with pytest.raises(ValueError, match="4 global tokens: the model was built for 3"):
        model(tokens_of(), global_tokens=jnp.zeros((B, 4), jnp.int32))
    with pytest.raises(ValueError, match="longer than the model's max_length 640"):
        model(tokens_of(641))
