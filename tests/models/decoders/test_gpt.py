import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.decoders.decoder_battery import DecoderBattery, forward
from transformer_jax.layers.positions.configs import Bucketed, NoPositions
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.training.config import as_json

CONFIG = GPTConfig(
    vocab_size=37, width=48, layers=3, heads=6, kv_heads=3, feed_forward=61, max_length=23, dropout=0.1,
)  # fmt: skip

CHANGES = dict(
    vocab_size=41, width=60, layers=2, heads=3, kv_heads=6, feed_forward=59, max_length=6, dropout=0.2,
    positions=NoPositions(), activation="relu", use_bias=False, tie=False, norm_epsilon=1e-2, dtype="bfloat16",
    vocab_multiple=7,
)  # fmt: skip


class TestGPT(DecoderBattery):
    module = GPT
    config = CONFIG
    changes = CHANGES


@pytest.mark.soak
class TestUntied(DecoderBattery):
    """Test a GPT without biases, with a separate table for the logits and T5's positions."""

    module = GPT
    config = dataclasses.replace(CONFIG, tie=False, use_bias=False, positions=Bucketed(8, 11))
    changes = CHANGES | dict(use_bias=True, tie=True)


@pytest.mark.soak
@pytest.mark.parametrize("positions", ["rotary", "shaw", "sinusoidal", "alibi", "none"])
def test_other_positions_in_steps(positions):
    """Cached steps equal the full pass for each scheme; the schemes' values are tested against oracles."""
    battery = TestGPT()
    battery.config = dataclasses.replace(CONFIG, positions=positions)
    tokens = jax.random.randint(jax.random.key(1), (battery.B, battery.T), 0, CONFIG.vocab_size)
    battery.test_cached_steps_equal_the_full_pass(tokens)
    battery.test_texts_that_start_at_different_positions(tokens)
    battery.test_cache_follows_beams(tokens, np.random.default_rng(0))
    battery.test_packed_rows_equal_single_documents(tokens)
    battery.test_no_leak_from_the_future(tokens)


@pytest.mark.parametrize(
    ("positions", "changed"),
    [
        ("rotary", "rotary:theta=100"),
        ("rotary", "rotary:scaling=linear,factor=2"),
        ("bucketed:buckets=8,max_distance=11", "bucketed:buckets=6,max_distance=11"),
        ("bucketed:buckets=8,max_distance=11", "bucketed:buckets=8,max_distance=12"),
        ("shaw:limit=4", "shaw:limit=5"),
    ],
)
def test_every_field_of_the_positions_matters(positions, changed):
    battery, tokens = TestGPT(), np.arange(7 * 13).reshape(7, 13) % CONFIG.vocab_size
    assert battery.trace(tokens, positions=positions) != battery.trace(tokens, positions=changed)


@pytest.mark.parametrize(
    "positions", ["learned", "rotary:theta=99.0,scaling=linear,factor=2.0", "shaw:limit=4"]
)
def test_a_config_is_the_same_from_its_json(positions):
    config = GPTConfig.preset("mini", 101, positions=positions)
    stored = json.loads(json.dumps(as_json(config)))
    assert stored["positions"] == positions
    assert GPTConfig(**stored) == config
    assert hash(GPTConfig(**stored)) == hash(config)


@pytest.mark.soak
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", "bucketed", "shaw"])
def test_order_matters_to_each_scheme(positions):
    """Swapping the first two of three tokens changes the last state, unless the model has no positions."""
    config = dataclasses.replace(CONFIG, positions=positions, layers=1)
    model = jax.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()
    logits, swapped = (forward(model, np.array([row], np.int32)) for row in ([5, 9, 7], [9, 5, 7]))
    assert np.abs(logits - swapped)[0, 2].max() > 1e-6
    unordered = jax.jit(lambda: GPT(dataclasses.replace(config, positions="none"), rngs=nnx.Rngs(0)))()
    logits, swapped = (forward(unordered, np.array([row], np.int32)) for row in ([5, 9, 7], [9, 5, 7]))
    np.testing.assert_allclose(logits[0, 2], swapped[0, 2], atol=1e-6)


# The published counts, and `num_parameters()` of transformers' model of the same sizes.
COUNTS = {"124M": 124_439_808, "355M": 354_823_168, "774M": 774_030_080, "1558M": 1_557_611_200}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published(name):
    assert jax.eval_shape(lambda: GPT(GPTConfig.preset(name), rngs=nnx.Rngs(0))).parameter_count == COUNTS[name]


def test_presets():
    assert set(COUNTS) | {"micro", "mini"} == set(GPTConfig.presets)
    with pytest.raises(ValueError, match="unknown preset 'huge': choose one of"):
        GPTConfig.preset("huge")
    with pytest.raises(ValueError, match="unknown positions 'up': choose one of learned, sinusoidal"):
        GPTConfig.preset("mini", positions="up")
    with pytest.raises(ValueError, match="width 128 must be a multiple of heads 5"):
        GPTConfig.preset("mini", heads=5)
