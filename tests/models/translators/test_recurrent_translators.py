"""LSTM and GRU sequence to sequence, Bahdanau's and Luong's attention: the same battery as the Transformer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.models.battery import TranslatorBattery, forward
from tests.oracles import recurrent as oracle
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.recurrent import run_cell, zero_state
from transformer_jax.models.translators import bahdanau, luong, seq2seq

COMMON = dict(vocab_size=37, width=12, hidden=17, dropout=0.1, max_length=23)
CHANGES = dict(
    vocab_size=41, width=10, hidden=19, layers=3, dropout=0.2, max_length=6, tie="none", dtype="bfloat16",
    vocab_multiple=7,
)  # fmt: skip


class TestSeq2Seq(TranslatorBattery):
    module = seq2seq.Seq2Seq
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = seq2seq.Seq2SeqConfig(layers=2, **COMMON)
    changes = CHANGES | dict(cell="gru")
    attends = False


class TestBahdanau(TranslatorBattery):
    module = bahdanau.Bahdanau
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = bahdanau.BahdanauConfig(layers=1, alignment=14, **COMMON)
    changes = CHANGES | dict(alignment=9)


class TestLuong(TranslatorBattery):
    module = luong.Luong
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = luong.LuongConfig(layers=2, **COMMON)
    changes = CHANGES | dict(score="dot", input_feeding=False)


@pytest.mark.soak
class TestSeq2SeqOfGRUs(TranslatorBattery):
    module = seq2seq.Seq2Seq
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = seq2seq.Seq2SeqConfig(layers=1, cell="gru", tie="none", **COMMON)
    changes = CHANGES | dict(cell="lstm", tie="all")
    attends = False


@pytest.mark.soak
class TestLuongConcat(TranslatorBattery):
    module = luong.Luong
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = luong.LuongConfig(layers=1, score="concat", input_feeding=False, tie="decoder", **COMMON)
    changes = CHANGES | dict(score="general", input_feeding=True)


def random(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32), model)


def as64(parameter):
    return np.asarray(parameter[...], np.float64)


def test_bahdanau_equals_the_papers_appendix():
    """Compare with float64 formulas on one sentence pair."""
    config = dataclasses.replace(TestBahdanau.config, tie="none", dropout=0.0)
    model = random(bahdanau.Bahdanau(config, rngs=nnx.Rngs(0)))
    source, target = np.array([5, 9, 30, 4]), np.array([1, 8, 22])
    embed = as64(model.source_embedding.table.embedding)[source]
    left, right = (
        oracle.run("gru", cell, embed, reverse=reverse)
        for cell, reverse in ((model.forward, False), (model.backward, True))
    )
    h = np.concatenate([left, right], axis=1)
    s = np.tanh(right[0] @ as64(model.first_state.kernel) + as64(model.first_state.bias))
    key = h @ as64(model.key.kernel) + as64(model.key.bias)
    logits, weights = [], []
    for y in as64(model.target_embedding.table.embedding)[target]:
        scores = np.tanh(s @ as64(model.query.kernel) + key) @ as64(model.direction)
        share = np.exp(scores - scores.max())
        share /= share.sum()
        c = share @ h
        pairs = np.concatenate([s, y, c]) @ as64(model.readout.kernel) + as64(model.readout.bias)
        t = np.maximum(pairs[0::2], pairs[1::2])
        s = oracle.gru_step(np.concatenate([y, c]), s, *oracle.cell_parameters(model.cell))
        logits.append(as64(model.unembedding.table.embedding)[:37] @ t)
        weights.append(share)
    ours, ours_weights = forward(model, source[None], target[None], return_weights=True)
    np.testing.assert_allclose(ours[0], logits, atol=1e-5)
    np.testing.assert_allclose(ours_weights[0, 0, 0], weights, atol=1e-5)


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_luong_equals_the_papers_equations(score):
    config = luong.LuongConfig(
        layers=1, score=score, tie="none", **(COMMON | dict(dropout=0.0, hidden=16, width=16))
    )
    model = random(luong.Luong(config, rngs=nnx.Rngs(0)))
    source, target = np.array([5, 9, 30, 4]), np.array([1, 8, 22])
    embed = as64(model.source_embedding.table.embedding)[source]
    (cell,) = model.encoder.cells
    W, U, _, b = oracle.cell_parameters(cell)
    c, h = np.zeros(16), np.zeros(16)
    memory = np.zeros((4, 16))
    for position in reversed(range(4)):
        c, h = oracle.lstm_step(embed[position], c, h, W, U, b)
        memory[position] = h
    W, U, _, b = oracle.cell_parameters(model.decoder.cells[0])
    fed, logits, weights = np.zeros(16), [], []
    for y in as64(model.target_embedding.table.embedding)[target]:
        c, h = oracle.lstm_step(np.concatenate([y, fed]), c, h, W, U, b)
        if score == "dot":
            scores = memory @ h
        elif score == "general":
            scores = memory @ as64(model.key.kernel) @ h
        else:
            both = h @ as64(model.query.kernel) + memory @ as64(model.key.kernel)
            scores = np.tanh(both) @ as64(model.direction)
        share = np.exp(scores - scores.max())
        share /= share.sum()
        fed = np.tanh(np.concatenate([share @ memory, h]) @ as64(model.readout.kernel))
        logits.append(as64(model.unembedding.table.embedding)[:37] @ fed)
        weights.append(share)
    ours, ours_weights = forward(model, source[None], target[None], return_weights=True)
    np.testing.assert_allclose(ours[0], logits, atol=1e-5)
    np.testing.assert_allclose(ours_weights[0, 0, 0], weights, atol=1e-5)


def test_seq2seq_starts_from_the_last_state_of_the_encoder():
    """The encoder reads the source in reverse, so that its last state is at the source's first token."""
    config = dataclasses.replace(TestSeq2Seq.config, dropout=0.0, tie="none", layers=1)
    model = random(seq2seq.Seq2Seq(config, rngs=nnx.Rngs(0)))
    source, target = np.array([[5, 9, 30, 4]]), np.array([[1, 8, 22]])
    (reader,), (writer,) = model.encoder.cells, model.decoder.cells
    _, state = run_cell(reader, model.source_embedding(source[:, ::-1]), zero_state(reader, 1))
    states, _ = run_cell(writer, model.target_embedding(target), state)
    expected = model.unembedding.logits(model.readout(states[1]))
    np.testing.assert_allclose(forward(model, source, target), expected, atol=1e-5)


@pytest.mark.parametrize("case", others_soak([TestSeq2Seq, TestBahdanau, TestLuong], TestBahdanau))
def test_one_token_has_finite_gradients(case):
    model = case.module(case.config, rngs=nnx.Rngs(0))
    token = jnp.ones((1, 1), jnp.int32)
    gradients = jax.grad(lambda m: jnp.square(m(token, token)).sum())(model)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_weights_without_attention_are_refused():
    model = seq2seq.Seq2Seq(TestSeq2Seq.config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Seq2Seq has no attention"):
        model(jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32), return_weights=True)


@pytest.mark.parametrize(
    "config", [seq2seq.Seq2SeqConfig, bahdanau.BahdanauConfig, luong.LuongConfig], ids=lambda c: c.__name__
)
def test_presets(config):
    tiny = config.preset("tiny", 100, dropout=0.5)
    assert (tiny.vocab_size, tiny.width, tiny.dropout) == (100, 256, 0.5)
    assert isinstance(tiny, config)
    assert tiny.layers == (1 if config is bahdanau.BahdanauConfig else 2)
    with pytest.raises(ValueError, match="unknown preset 'base': choose one of mini, tiny, small"):
        config.preset("base", 100)
    with pytest.raises(ValueError, match="does not define vocab_size: pass it"):
        config.preset("tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden=0), "hidden=0 must be at least 1"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(tie="some"), "tie='some' is not one of all, decoder, none"),
        (dict(layers=2), "layers=2: the model has one layer"),
        (dict(alignment=0), "alignment=0 must be at least 1"),
    ],
)
def test_values_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TestBahdanau.config, **change)
