"""Weights of 8 bits: against a NumPy oracle, and in every decoder against the same rounded weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.decoding.generation import Generator, Sampling, for_decoding
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.errors import UserError
from transformer_jax.layers.embedding import TokenEmbedding
from transformer_jax.layers.int8 import Int8Dense, Int8Embedding, quantize
from transformer_jax.models.registry import DECODERS
from transformer_jax.parameter_names import named_leaves

V = 40
SIZES = dict(width=16, layers=2, heads=4, kv_heads=2, feed_forward=24, max_length=32, dropout=0.0)


def rounded(weight, axis):
    """Return the weight that 8 bits represent."""
    # In float32, because another precision rounds ties to other integers.
    scale = np.abs(weight).max(axis=axis, keepdims=True) / np.float32(127)
    return np.round(weight / np.where(scale == 0, np.float32(1), scale)) * scale


def test_integers_and_scales(rng):
    weight = rng.normal(size=(7, 5)).astype(np.float32)
    weight[:, 2] = 0
    integers, scales = quantize(jnp.asarray(weight), (0,))
    assert integers.dtype == jnp.int8
    assert np.abs(np.asarray(integers)).max(axis=0).tolist() == [127, 127, 0, 127, 127]
    np.testing.assert_allclose(integers * scales, rounded(weight, 0), atol=1e-6)
    # Rounding to the nearest integer is off by at most half a step.
    assert (np.abs(integers * scales - weight) <= np.asarray(scales) * 0.5001).all()


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_of_several_axes(rng, bias):
    layer = nnx.LinearGeneral((3, 4), (5, 2), axis=(-2, -1), use_bias=bias, rngs=nnx.Rngs(0))
    if bias:
        layer.bias[...] = jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    x = rng.normal(size=(2, 6, 3, 4)).astype(np.float32)
    kernel = np.asarray(layer.kernel[...])
    quantized = Int8Dense(layer.kernel[...], layer.bias[...] if bias else None, inputs=2, dtype="float32")
    expected = np.einsum("btij,ijko->btko", x, rounded(kernel, (0, 1)))
    if bias:
        expected = expected + np.asarray(layer.bias[...])
    np.testing.assert_allclose(quantized(jnp.asarray(x)), expected, atol=1e-5)


def test_a_table(rng):
    table = TokenEmbedding(V, 16, multiple=128, std=1.0, dtype="float32", rngs=nnx.Rngs(0))
    quantized = Int8Embedding(table)
    weight = rounded(np.asarray(table.table.embedding[:V]), 1)
    tokens = jnp.asarray([[3, 0], [39, 3]])
    np.testing.assert_allclose(quantized(tokens), weight[np.asarray(tokens)], atol=1e-6)
    x = rng.normal(size=(2, 16)).astype(np.float32)
    np.testing.assert_allclose(quantized.logits(jnp.asarray(x)), x @ weight.T, atol=1e-5)


def decoder(name):
    entry = DECODERS[name]
    config = entry.preset(entry.presets[0], V)
    fields = {field.name for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{key: value for key, value in SIZES.items() if key in fields})
    return entry.module(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["gpt", "llama", "modern_gpt"])
def test_a_decoder_equals_itself_with_rounded_weights(name):
    model = decoder(name)
    quantized = for_decoding(model, int8=True)
    leaves = named_leaves(quantized)
    integers = sum(leaf.size for leaf in leaves.values() if leaf.dtype == jnp.int8)
    assert integers > 0.8 * sum(leaf.size for path, leaf in leaves.items() if "scales" not in path)
    exact = for_decoding(model)
    for block in exact.blocks:
        for layer in (block.attention.output, *(vars(block.feed_forward).values())):
            if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
                axes = (0, 1) if layer is block.attention.output else (0,)
                layer.kernel[...] = jnp.asarray(rounded(np.asarray(layer.kernel[...]), axes), jnp.float32)
        kernel = block.attention.kernel
        kernel[...] = jnp.asarray(rounded(np.asarray(kernel[...]), 0), jnp.float32)
    for table in (exact.embedding, exact.unembedding):
        if table is not None:
            rows = np.asarray(table.table.embedding[...])
            table.table.embedding[...] = jnp.asarray(rounded(rows, 1), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 9)))

    def logits(model):
        return jax.jit(lambda model: model.step_function()(model.start(2, max_length=16), tokens)[0].logits)(
            model
        )

    np.testing.assert_allclose(logits(quantized), logits(exact), atol=1e-4)


def test_generation_and_errors():
    model = decoder("gpt")
    generator = Generator(model, sampling=Sampling(temperature=0), int8=True)
    texts = generator([[1, 2, 3], [4]], 5, [jax.random.key(0)] * 2)
    assert [len(text) for text in texts] == [5, 5]
    with pytest.raises(UserError, match="this one is recurrent"):
        Generator(decoder("lstm"), int8=True)
    with on_mesh(make_mesh("data=8")), pytest.raises(UserError, match="one device: remove `mesh`"):
        Generator(model, int8=True)
