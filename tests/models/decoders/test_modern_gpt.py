import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.decoders.decoder_battery import DecoderBattery, forward
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.models.decoders.modern_gpt import ModernGPT, ModernGPTConfig

CONFIG = ModernGPTConfig(
    vocab_size=37, width=48, layers=3, heads=6, kv_heads=3, feed_forward=61, max_length=23, dropout=0.1,
)  # fmt: skip


class TestModernGPT(DecoderBattery):
    module = ModernGPT
    config = CONFIG
    changes = dict(  # noqa: RUF012
        vocab_size=41, width=60, layers=2, heads=3, kv_heads=6, feed_forward=59, max_length=6, dropout=0.2,
        rotary_theta=100.0, rotary_scaling=RotaryScaling("linear", 2.0), logit_cap=30.0, tie=True,
        norm_epsilon=1e-2, dtype="bfloat16", vocab_multiple=7,
    )  # fmt: skip


def test_initial_logits_are_zero():
    """The initial loss is exactly log V."""
    model = jax.jit(lambda: ModernGPT(CONFIG, rngs=nnx.Rngs(0)))()
    logits = forward(model, np.arange(22, dtype=np.int32).reshape(2, 11))
    np.testing.assert_array_equal(logits, np.zeros_like(logits))


def test_logits_stay_below_the_cap():
    battery = TestModernGPT()
    model = battery.make(logit_cap=0.5)
    logits = forward(model, np.arange(22, dtype=np.int32).reshape(2, 11))
    assert 0.4 < np.abs(logits).max() < 0.5


def test_no_more_parameters_than_nanogpt_on_shakespeare():
    """nanoGPT's model of the CPU budget has 804,096, its positions not counted."""
    model = jax.eval_shape(
        lambda: ModernGPT(ModernGPTConfig.preset("mini", 65, max_length=64), rngs=nnx.Rngs(0))
    )
    assert model.parameter_count == 803_200 <= 804_096


def test_an_unknown_preset():
    with pytest.raises(ValueError, match="unknown preset '1T'"):
        ModernGPTConfig.preset("1T")
