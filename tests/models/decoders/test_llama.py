import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.decoders.decoder_battery import DecoderBattery
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.models.decoders.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=37, width=48, layers=3, heads=6, kv_heads=3, feed_forward=61, max_length=23, dropout=0.1,
)  # fmt: skip


class TestLlama(DecoderBattery):
    module = Llama
    config = CONFIG
    changes = dict(  # noqa: RUF012
        vocab_size=41, width=60, layers=2, heads=3, kv_heads=6, feed_forward=59, head_width=10, max_length=6,
        dropout=0.2, rotary_theta=100.0, rotary_scaling=RotaryScaling("linear", 2.0), attention_bias=True,
        feed_forward_bias=True, tie=True, norm_epsilon=1e-2, dtype="bfloat16", vocab_multiple=7, window=3,
        dilation=(2, {"window": 4}),
    )  # fmt: skip


class TestLlamaWithAWindow(DecoderBattery):
    """The cache keeps five positions, and every text is longer."""

    module = Llama
    config = dataclasses.replace(CONFIG, window=5)
    changes = TestLlama.changes | {"dilation": 2}
    # The weights of a step are those of the kept positions, in the order of the cache.
    attends = False
    # A cache of a window cannot go back, see `test_the_cache_holds_no_more_than_the_window`.
    test_decoding_continues_from_a_truncated_cache = None


# The published counts, and `num_parameters()` of transformers' model of the same sizes.
COUNTS = {
    "7B": 6_738_415_616, "13B": 13_015_864_320, "2-7B": 6_738_415_616, "2-13B": 13_015_864_320,
    "2-70B": 68_976_648_192, "3-8B": 8_030_261_248, "3-70B": 70_553_706_496, "3.1-8B": 8_030_261_248,
    "3.2-1B": 1_235_814_400, "3.2-3B": 3_212_749_824, "mistral-7B": 7_241_732_096,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published(name):
    model = jax.eval_shape(lambda: Llama(LlamaConfig.preset(name), rngs=nnx.Rngs(0)))
    assert model.parameter_count == COUNTS[name]


def test_presets():
    assert set(COUNTS) | {"mini"} == set(LlamaConfig.presets)
    with pytest.raises(ValueError, match="unknown preset '4': choose one of"):
        LlamaConfig.preset("4")
    assert LlamaConfig.preset("3.2-1B", 100).vocab_size == 100


def test_rotary_scaling_is_read_from_json():
    scaling = RotaryScaling("llama3", 8.0, original_length=64)
    stored = dict(kind="llama3", factor=8.0, original_length=64)
    assert LlamaConfig.preset("mini", rotary_scaling=stored).rotary_scaling == scaling


def test_the_cache_holds_no_more_than_the_window():
    model = Llama(dataclasses.replace(CONFIG, window=5), rngs=nnx.Rngs(0))
    cache = model.start(2, max_length=20)
    assert {layer.keys.shape[3] for layer in cache.target} == {5}
    assert model.start(2, max_length=4).target[0].keys.shape[3] == 4
    with pytest.raises(ValueError, match="the last 5 positions cannot go back"):
        cache.truncate(jnp.zeros((), jnp.int32))


@pytest.mark.parametrize(
    "sizes",
    [(7, 1, 1, 5, 2, 4), *(pytest.param(s, marks=pytest.mark.soak) for s in ((20,), (1,) * 20, (3, 9, 8)))],
)
def test_steps_of_any_size_equal_the_full_pass(sizes):
    """The last tokens of a step overwrite keys that its first ones still see; rows start at two positions."""
    model = Llama(dataclasses.replace(CONFIG, window=5, dropout=0.0), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 20)))
    first = jnp.array([0, 6])
    cache = model.start(2, max_length=20, first=first)
    step, logits, position = model.step_function(), [], 0
    for size in sizes:
        output, cache = step(cache, tokens[:, position : position + size])
        logits.append(output.logits)
        position += size
    logits = jnp.concatenate(logits, axis=1)
    np.testing.assert_allclose(logits[0], model(tokens)[0], atol=2e-5)
    np.testing.assert_allclose(logits[1, 6:], model(tokens[1:, 6:])[0], atol=2e-5)


def test_a_prompt_fills_the_window():
    model = Llama(dataclasses.replace(CONFIG, window=5, dropout=0.0), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 20)))
    step, expected = model.step_function(), model(tokens)
    cache = model.start(2, max_length=20)
    output, cache = step(cache, tokens[:, :13], prompt=True)
    np.testing.assert_allclose(output.logits[:, -1], expected[:, 12], atol=2e-5)
    for position in range(13, 20):
        output, cache = step(cache, tokens[:, position : position + 1])
        np.testing.assert_allclose(output.logits[:, 0], expected[:, position], atol=2e-5)


def test_windows_that_are_refused():
    for changes, message in (
        (dict(window=0), "window=0 must be at least 1"),
        (dict(dilation=2), "dilation=2 needs a window"),
        (dict(window=3, dilation=0), "dilation=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)
    model = Llama(dataclasses.replace(CONFIG, window=5, dilation=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dilation=2: a model with a dilated window has no cache"):
        model.start(2, max_length=20)
