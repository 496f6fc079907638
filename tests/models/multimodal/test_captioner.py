"""The captioner: cached steps, beams, causality, every field, and its two halves."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.models.encoder_decoder_battery import EncoderDecoderBattery, forward, step
from tests.models.traces import trace_of, unread_fields
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.multimodal.captioner import Captioner, CaptionerConfig

CONFIG = CaptionerConfig(
    image_size=12, patch_size=4, width=24, layers=2, heads=2, feed_forward=20, vocab_size=53, max_length=11,
    decoder_width=16, decoder_layers=3, decoder_heads=4, decoder_feed_forward=28,
)  # fmt: skip
CHANGES = {
    "image_size": 16, "patch_size": 6, "width": 32, "layers": 3, "heads": 4, "feed_forward": 36, "channels": 2,
    "patch_bias": False, "convolutions": 1, "pooling": "mean", "positions": "sinusoidal", "registers": 2,
    "distillation": True, "norm": "post", "input_norm": True, "final_norm": False, "layer_scale": 0.5,
    "gated": True, "activation": "quick_gelu", "norm_epsilon": 0.1, "pooler": True, "dtype": "bfloat16",
    "vocab_size": 60, "max_length": 13, "decoder_width": 32, "decoder_layers": 2, "decoder_heads": 2,
    "decoder_feed_forward": 12, "decoder_activation": "relu", "decoder_epsilon": 0.1, "tie": False,
    "vocab_multiple": 64, "dropout": 0.5, "attention_dropout": 0.5, "stochastic_depth": 0.5,
    "decoder_dropout": 0.5,
}  # fmt: skip
# Fields that only matter with a head, or for images of another size.
NOT_HERE = {"classes", "distillation_head", "antialias"}
B, T = 3, 9


@functools.cache
def model_of(compute=ComputeOptions(), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: Captioner(config, rngs=nnx.Rngs(0), compute=compute))()


def inputs(size=12, channels=3, captions=1):
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.normal(size=(B, size, size, channels)), jnp.float32)
    return images, jnp.asarray(rng.integers(0, 53, (B * captions, T)), jnp.int32)


class TestCaptioner(EncoderDecoderBattery):
    model_of = staticmethod(model_of)
    arrays = staticmethod(inputs)
    texts_per_input = 2
    dropout = "decoder_dropout"
    changed: ClassVar = {"tie": False}

    def texts(self):
        """Return the images with two captions of each in adjacent rows."""
        return inputs(captions=2)


def test_shapes():
    for dtype in ("float32", "bfloat16"):
        logits, weights = forward(model_of(dtype=dtype), *inputs(), return_weights=True)
        assert (logits.shape, logits.dtype) == ((B, T, 53), jnp.float32)
        assert weights.shape == (B, 3, 4, T, 10)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=0.02 if dtype == "bfloat16" else 1e-5)


def test_several_captions_of_an_image_equal_one_at_a_time():
    images, tokens = inputs(captions=2)
    logits, weights = forward(model_of(), images, tokens, return_weights=True)
    repeated = forward(model_of(), jnp.repeat(images, 2, axis=0), tokens, return_weights=True)
    np.testing.assert_allclose(logits, repeated[0], atol=2e-5)
    np.testing.assert_allclose(weights, repeated[1], atol=1e-6)


def test_the_cache_follows_a_reordering():
    images, tokens = inputs(captions=2)
    rows = jnp.arange(2 * B) ^ 1
    cache = model_of().start(images, max_length=T).repeat(2)
    _, cache = step(model_of(), cache, tokens[:, :3])
    output, _ = step(model_of(), cache.reorder(rows), tokens[rows][:, 3:])
    expected = forward(model_of(), images, tokens[rows])
    np.testing.assert_allclose(output.logits, expected[:, 3:], atol=2e-5)


def test_every_field_matters():
    def trace(**changes):
        config = dataclasses.replace(CONFIG, **changes)

        def init_and_apply(key):
            arguments = inputs(config.image_size, config.channels)
            return Captioner(config, rngs=nnx.Rngs(key))(*arguments, dropout_key=key)

        return trace_of(init_and_apply)

    assert unread_fields(trace, CHANGES) == []


def test_every_field_is_tested():
    assert CHANGES.keys() | NOT_HERE == {field.name for field in dataclasses.fields(CaptionerConfig)}


def test_equal_widths_have_no_projection():
    assert model_of(decoder_width=24).projection is None
    assert model_of().projection is not None


@pytest.mark.parametrize(
    "field",
    others_soak(
        ["dropout", "attention_dropout", "stochastic_depth", "decoder_dropout"],
        "stochastic_depth",
        "decoder_dropout",
    ),
)
def test_randomness_is_on_only_with_a_key(field):
    model = model_of(**{field: 0.5})
    plain = forward(model, *inputs())
    np.testing.assert_array_equal(plain, forward(model, *inputs()))
    first, second = (forward(model, *inputs(), dropout_key=jax.random.key(seed)) for seed in (0, 1))
    assert (first != second).any()
    assert (first != plain).any()


def test_the_count_of_parameters_has_no_padding():
    config = dataclasses.replace(CONFIG, vocab_multiple=1)
    unpadded = Captioner(config, rngs=nnx.Rngs(0))
    assert model_of().parameter_count == sum(x.size for x in jax.tree.leaves(unpadded))


def test_captions_that_do_not_fit():
    images, tokens = inputs()
    with pytest.raises(ValueError, match="a text of 18 tokens is longer than the model's max_length 11"):
        model_of()(images, jnp.tile(tokens, 2))
    with pytest.raises(ValueError, match="a caption of 12 tokens is longer"):
        model_of().start(images, max_length=12)
    with pytest.raises(ValueError, match="decoder_layers=0 must be at least 1"):
        dataclasses.replace(CONFIG, decoder_layers=0)
    with pytest.raises(ValueError, match="16 must be a multiple of heads 3"):
        dataclasses.replace(CONFIG, decoder_heads=3)
