"""Whisper: cached steps, beams, causality, every field, shardings, and the CTC head."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.encoder_decoder_battery import EncoderDecoderBattery, forward
from tests.models.traces import trace_of, unread_fields
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.speech.whisper import Whisper, WhisperConfig

CONFIG = WhisperConfig(
    vocab_size=53, width=24, encoder_layers=2, decoder_layers=3, heads=2, feed_forward=20, mel_bins=7,
    max_frames=44, max_length=11, ctc=True,
)  # fmt: skip
CHANGES = {
    "vocab_size": 60, "width": 32, "encoder_layers": 3, "decoder_layers": 2, "heads": 4, "feed_forward": 36,
    "mel_bins": 9, "max_frames": 46, "kernel": 5, "strides": (2, 2), "max_length": 13, "ctc": False,
    "norm_epsilon": 0.1, "dtype": "bfloat16", "vocab_multiple": 64, "dropout": 0.5,
}  # fmt: skip
B, T, FRAMES = 3, 9, 42


@functools.cache
def model_of(compute=ComputeOptions(), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: Whisper(config, rngs=nnx.Rngs(0), compute=compute))()


def inputs(bins=7):
    rng = np.random.default_rng(1)
    spectrograms = jnp.asarray(rng.normal(size=(B, FRAMES, bins)), jnp.float32)
    return spectrograms, jnp.asarray(rng.integers(0, 53, (B, T)), jnp.int32)


class TestWhisper(EncoderDecoderBattery):
    model_of = staticmethod(model_of)
    arrays = staticmethod(inputs)

    def loss(self, model):
        """Compute a number that depends on every parameter, also on those of the CTC head."""
        return super().loss(model) + jnp.square(model.ctc_logits(model.encode(inputs()[0]))).mean()


def test_shapes():
    for dtype in ("float32", "bfloat16"):
        model = model_of(dtype=dtype)
        logits, weights = forward(model, *inputs(), return_weights=True)
        assert (logits.shape, logits.dtype) == ((B, T, 53), jnp.float32)
        assert weights.shape == (B, 3, 2, T, 21)
        states = model.encode(inputs()[0])
        assert (model.ctc_logits(states).shape, model.ctc_logits(states).dtype) == ((B, 21, 54), jnp.float32)


def test_every_field_matters():
    def trace(**changes):
        config = dataclasses.replace(CONFIG, **changes)

        def init_and_apply(key):
            model = Whisper(config, rngs=nnx.Rngs(key))
            arguments = inputs(config.mel_bins)
            return model(*arguments, dropout_key=key)

        return trace_of(init_and_apply)

    assert unread_fields(trace, CHANGES) == []


def test_every_field_is_tested():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(WhisperConfig)}


def test_dropout_is_on_only_with_a_key():
    model = model_of(dropout=0.5)
    plain = forward(model, *inputs())
    np.testing.assert_array_equal(plain, forward(model_of(), *inputs()))
    first, second = (forward(model, *inputs(), dropout_key=jax.random.key(seed)) for seed in (0, 1))
    assert (first != second).any()
    assert (first != plain).any()


def test_recordings_that_do_not_fit():
    spectrograms, tokens = inputs()
    with pytest.raises(ValueError, match=r"must be \(B, frames, 7\)"):
        model_of()(spectrograms[..., :5], tokens)
    with pytest.raises(ValueError, match="a spectrogram has 84 frames; the model takes 2 to 44"):
        model_of()(jnp.tile(spectrograms, (1, 2, 1)), tokens)
    with pytest.raises(ValueError, match="a transcript of 12 tokens is longer"):
        model_of().start(spectrograms, max_length=12)
    with pytest.raises(ValueError, match="no CTC head"):
        model_of(ctc=False).ctc_logits(spectrograms)
    for field, value, message in (
        ("kernel", 4, "kernel=4 must be an odd number"),
        ("strides", (1,), "must be two numbers"),
        ("heads", 5, "width 24 must be a multiple of heads 5|24 must be a multiple of heads 5"),
        ("max_frames", 1, "max_frames=1 must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **{field: value})
