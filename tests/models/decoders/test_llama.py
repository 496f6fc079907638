import jax
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
        feed_forward_bias=True, tie=True, norm_epsilon=1e-2, dtype="bfloat16", vocab_multiple=7,
    )  # fmt: skip


# The published counts, and `num_parameters()` of transformers' model of the same sizes.
COUNTS = {
    "7B": 6_738_415_616, "13B": 13_015_864_320, "2-7B": 6_738_415_616, "2-13B": 13_015_864_320,
    "2-70B": 68_976_648_192, "3-8B": 8_030_261_248, "3-70B": 70_553_706_496, "3.1-8B": 8_030_261_248,
    "3.2-1B": 1_235_814_400, "3.2-3B": 3_212_749_824,
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
