"""Every model of the registry under JAX's transformations: forward mode, second derivatives, ensembles."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import DECODERS, TRANSLATORS

B, T = 3, 4  # 12 rows: a dense layer of up to 8 has no fusion barrier
V = 11
STACK = dict(width=8, heads=2, kv_heads=1, feed_forward=12)
RECURRENT = dict(width=6, hidden=8, layers=1)
SIZES = {
    "transformer": STACK | dict(kv_heads=2, encoder_layers=1, decoder_layers=1),
    "gpt": STACK | dict(kv_heads=2, layers=2),
    "llama": STACK | dict(layers=2),
    "modern_gpt": STACK | dict(layers=2),
    **dict.fromkeys(("lstm", "gru", "luong"), RECURRENT),
    **dict.fromkeys(("bahdanau", "hard_attention"), RECURRENT | dict(alignment=5)),
}
MODELS = [("translators", name) for name in TRANSLATORS] + [("decoders", name) for name in DECODERS]

# Compiling takes the time here: this halves it.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def make(kind, name):
    entry = {"translators": TRANSLATORS, "decoders": DECODERS}[kind][name]
    config = entry.preset(entry.presets[0], V)
    fields = {field.name for field in dataclasses.fields(config)}
    changes = SIZES[name] | dict(dropout=0.0, max_length=8)
    if "vocab_multiple" in fields:
        changes["vocab_multiple"] = 1
    if "tie" in fields and "hidden" in fields:
        changes["tie"] = False if kind == "decoders" else "none"
    config = dataclasses.replace(config, **changes)
    return jit(lambda: entry.module(config, rngs=nnx.Rngs(0), compute=ComputeOptions(unroll=1)))()


def tokens(kind):
    drawn = jax.random.randint(jax.random.key(1), (2, B, T), 3, V)
    return tuple(drawn) if kind == "translators" else (drawn[0],)


def loss(model, inputs):
    """Return a smooth loss with a nonzero second derivative."""
    return -jax.nn.log_softmax(model(*inputs))[..., 3].mean()


def direction(model, seed):
    """Draw a normal tangent for every parameter, small enough that the loss stays smooth along it."""

    def drawn(path, leaf):
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(jax.tree_util.keystr(path).encode()))
        return 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, model)


def inner(first, second):
    """Return (the inner product of two trees, the sum of the magnitudes of its terms)."""
    products = [a * b for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)]
    return sum(x.sum() for x in products), sum(jnp.abs(x).sum() for x in products)


def on_plane(model, inputs):
    """Return the loss as a function of two numbers, which move the parameters along two directions."""
    along = direction(model, 2), direction(model, 3)

    def moved(point):
        return loss(jax.tree.map(lambda x, a, b: x + point[0] * a + point[1] * b, model, *along), inputs)

    return moved


@pytest.mark.parametrize(
    ("kind", "name"),
    others_soak(MODELS, ("translators", "transformer"), ("translators", "luong")),
)
def test_forward_mode_equals_reverse_mode(kind, name):
    model, inputs = make(kind, name), tokens(kind)
    along = direction(model, 2)

    @jit
    def derivatives(model):
        def value(model):
            return loss(model, inputs)

        primal, linear = jax.linearize(value, model)
        product = inner(jax.grad(value)(model), along)
        return value(model), jax.jvp(value, (model,), (along,)), (primal, linear(along)), product

    value, (primal, tangent), (linear_primal, linear_tangent), (expected, magnitude) = derivatives(model)
    np.testing.assert_allclose([primal, linear_primal], value, rtol=1e-6)
    # Each term of a sum is rounded (1.2e-7 in float32) in tens of operations, so the bound follows the
    # magnitudes of the terms instead of that of their sum, which may nearly vanish.
    np.testing.assert_allclose([tangent, linear_tangent], expected, rtol=0, atol=1e-5 * magnitude)
    # Recurrent models have no fusion barrier.
    assert ("fusion_barrier" in str(jax.make_jaxpr(loss)(model, inputs))) == ("heads" in SIZES[name])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), others_soak(MODELS, ("translators", "bahdanau")))
def test_hessians_in_forward_and_reverse_mode(kind, name):
    """Compare forward over reverse mode (`jax.hessian`) with forward over forward mode."""
    model, inputs = make(kind, name), tokens(kind)

    @jit
    def hessians(model):
        value = on_plane(model, inputs)
        return jax.hessian(value)(jnp.zeros(2)), jax.jacfwd(jax.jacfwd(value))(jnp.zeros(2))

    hessian, expected = hessians(model)
    largest = np.abs(hessian).max()
    assert largest > 1e-6
    # Entries are sums over all parameters, see `test_forward_mode_equals_reverse_mode`.
    np.testing.assert_allclose(hessian, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize(
    ("kind", "name"),
    others_soak(MODELS, ("translators", "transformer"), ("translators", "luong"), ("decoders", "modern_gpt")),
)
def test_an_ensemble_equals_its_models(kind, name):
    model, inputs = make(kind, name), tokens(kind)
    models = model, jax.tree.map(jnp.add, model, direction(model, 2))
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)

    def logits(model):
        return model(*inputs)

    outputs, single = jit(jax.vmap(logits))(ensemble), jit(logits)
    for output, model in zip(outputs, models, strict=True):
        np.testing.assert_allclose(output, single(model), rtol=1e-5, atol=2e-6)


@pytest.mark.soak
def test_a_jacobian_of_a_chunked_model():
    """Forward mode by columns and reverse mode by rows both equal the Jacobian of the plain model."""
    kind, name = "decoders", "gpt"
    entry, (text,) = DECODERS[name], tokens(kind)
    config = dataclasses.replace(
        entry.preset(entry.presets[0], V), **SIZES[name], dropout=0.0, max_length=8, vocab_multiple=1
    )

    def jacobian(transformation, attention):
        model = entry.module(
            config, rngs=nnx.Rngs(0), compute=ComputeOptions(unroll=1, attention=attention, remat="blocks")
        )
        along = direction(model, 2), direction(model, 3)

        def moved(point):
            return jax.tree.map(lambda x, a, b: x + point[0] * a + point[1] * b, model, *along)(text[:1])

        return jit(transformation(moved))(jnp.zeros(2))

    expected = jacobian(jax.jacfwd, "plain")
    np.testing.assert_allclose(jacobian(jax.jacfwd, "chunked"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jacobian(jax.jacrev, "chunked"), expected, rtol=1e-5, atol=1e-5)
