import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.decoders.decoder_battery import DecoderBattery, forward
from tests.oracles import recurrent as oracle
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.recurrent_lm import RecurrentLM, RecurrentLMConfig

CONFIG = RecurrentLMConfig(vocab_size=37, width=12, hidden=17, layers=2, max_length=23, dropout=0.1)
CHANGES = dict(
    vocab_size=41, width=10, hidden=19, layers=1, cell="gru", dropout=0.2, max_length=6, tie=False,
    dtype="bfloat16", vocab_multiple=7,
)  # fmt: skip


class TestLSTM(DecoderBattery):
    module = RecurrentLM
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = CONFIG
    changes = CHANGES
    attends = False
    further_steps = 160  # a state of 17 numbers takes its time


@pytest.mark.soak
class TestGRU(DecoderBattery):
    module = RecurrentLM
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = RecurrentLMConfig(
        vocab_size=37, width=12, hidden=17, layers=1, cell="gru", max_length=23, dropout=0.1, tie=False
    )
    changes = CHANGES | dict(layers=2, cell="lstm", tie=True)
    attends = False
    further_steps = 160  # a state of 17 numbers takes its time


def test_it_is_the_formula():
    config = RecurrentLMConfig(vocab_size=37, width=12, hidden=17, layers=1, tie=False)
    rng = np.random.default_rng(0)
    model = RecurrentLM(config, rngs=nnx.Rngs(0))
    model = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32), model)
    tokens = np.array([5, 9, 30, 4])
    embedded = np.asarray(model.embedding.table.embedding[...], np.float64)[tokens] * 12**0.5
    h = oracle.run("lstm", model.decoder.cells[0], embedded)
    outputs = h @ np.asarray(model.readout.kernel[...], np.float64) + np.asarray(model.readout.bias[...])
    expected = outputs @ np.asarray(model.unembedding.table.embedding[...], np.float64)[:37].T
    np.testing.assert_allclose(forward(model, tokens[None])[0], expected, atol=1e-5)


def test_presets():
    assert RecurrentLMConfig.preset("medium", 10_000).hidden == 650
    with pytest.raises(ValueError, match="unknown preset 'huge': choose one of mini, small"):
        RecurrentLMConfig.preset("huge", 100)


def test_no_weights():
    model = RecurrentLM(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has no attention"):
        model.step_function(return_weights=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cell="rnn"), "cell='rnn' is not one of lstm, gru"),
        (dict(layers=0), "layers=0 must be at least 1"),
        (dict(dropout=-0.1), "dropout=-0.1 must be at least 0"),
    ],
)
def test_values_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        RecurrentLMConfig(**(dict(vocab_size=37, width=12, hidden=17, layers=1) | change))
