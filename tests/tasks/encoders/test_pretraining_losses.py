"""Losses of pretraining against NumPy, row by row and word by word, on the models' own logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.layers.losses import sample_tokens, token_keys
from transformer_jax.models.encoders.bert import BertConfig, BertMaskedLM
from transformer_jax.models.encoders.electra import ElectraConfig, ElectraPretraining
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.encoders.masked_language_modeling import MaskedWords
from transformer_jax.tasks.encoders.replaced_token_detection import ReplacedTokens

SIZES = dict(vocab_size=53, width=16, layers=1, heads=2, feed_forward=24, max_length=12, dropout=0.0)


@pytest.fixture
def batch(rng):
    """Return three rows: five masked words, two in a row of nine tokens, and a row of padding."""
    segments = np.ones((3, 12), np.int32)
    segments[1, 9:] = 0
    segments[2] = 0
    positions = np.stack([rng.permutation(9)[:5] for _ in range(3)])
    weights = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], np.float32)
    arrays = {
        "tokens": rng.integers(5, 53, (3, 12), np.int32), "segments": segments, "positions": positions,
        "labels": rng.integers(5, 53, (3, 5), np.int32), "weights": weights,
    }  # fmt: skip
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def surprisal(logits, label):
    """Return -log softmax(logits)[label] in float64."""
    logits = np.asarray(logits, np.float64)
    return np.log(np.exp(logits).sum()) - logits[label]


def test_masked_words_and_next_sentences(rng, batch):
    model = BertMaskedLM(BertConfig(**SIZES), rngs=nnx.Rngs(0))
    batch |= {
        "types": jnp.asarray(rng.integers(0, 2, (3, 12), np.int32)),
        "next_label": jnp.array([1, 0, 0]),
        "next_weight": jnp.array([1.0, 0.0, 1.0]),
    }

    @jax.jit
    def outputs(model):
        states = model.hidden_states(batch["tokens"], types=batch["types"], segments=batch["segments"])
        return model.logits(states), model.sentence_logits(states[:, 0])

    logits, pairs = outputs(model)
    word_losses = [
        [surprisal(logits[row, batch["positions"][row, n]], batch["labels"][row, n]) for n in range(count)]
        for row, count in ((0, 5), (1, 2))
    ]
    pair_loss = surprisal(pairs[0], 1)
    sums, counts = jax.jit(lambda model: MaskedWords().loss(model, None, batch, None))(model)
    # The second row has no pair, and the third is padding.
    assert {name: float(x) for name, x in counts.items()} == {
        "masked_loss": 7, "masked_accuracy": 7, "next_loss": 1, "next_accuracy": 1, "loss": 2
    }  # fmt: skip
    assert float(sums["masked_loss"]) == pytest.approx(sum(map(sum, word_losses)), rel=1e-5)
    assert float(sums["next_loss"]) == pytest.approx(pair_loss, rel=1e-5)
    assert float(sums["loss"]) == pytest.approx(sum(map(np.mean, word_losses)) + pair_loss, rel=1e-5)


def test_replaced_tokens(batch):
    config = ElectraConfig(**SIZES, attention_dropout=0.0, embedding_width=8, generator_size=0.5)
    model = ElectraPretraining(config, rngs=nnx.Rngs(0))
    key = jax.random.key(3)
    logits = jax.jit(
        lambda model: model.generator_logits(
            model.generator_states(batch["tokens"], batch["positions"], segments=batch["segments"])
        )
    )(model)
    drawn = sample_tokens(token_keys(jax.random.split(key, 3)[1], (3, 5)), logits)
    tokens, replaced = np.array(batch["tokens"]), np.zeros((3, 12))
    word_losses = []
    for row, count in ((0, 5), (1, 2)):
        for n in range(count):
            place, label = batch["positions"][row, n], batch["labels"][row, n]
            tokens[row, place], replaced[row, place] = drawn[row, n], drawn[row, n] != label
        word_losses.append([surprisal(logits[row, n], batch["labels"][row, n]) for n in range(count)])
    outputs = jax.jit(lambda model: model.replaced(jnp.asarray(tokens), segments=batch["segments"]))(model)
    chance = 1 / (1 + np.exp(-np.asarray(outputs, np.float64)))
    token_losses = [
        [-np.log(chance[row, n] if replaced[row, n] else 1 - chance[row, n]) for n in range(length)]
        for row, length in ((0, 12), (1, 9))
    ]
    sums, counts = jax.jit(lambda model: ReplacedTokens(50.0).loss(model, None, batch, key))(model)
    assert (float(counts["generator_loss"]), float(counts["discriminator_loss"])) == (7, 21)
    assert float(sums["generator_loss"]) == pytest.approx(sum(map(sum, word_losses)), rel=1e-5)
    assert float(sums["discriminator_loss"]) == pytest.approx(sum(map(sum, token_losses)), rel=1e-5)
    assert float(sums["replaced"]) == replaced.sum() > 0
    total = sum(map(np.mean, word_losses)) + 50 * sum(map(np.mean, token_losses))
    assert float(sums["loss"]) == pytest.approx(total, rel=1e-5)
    # Drawn words have no gradient: the generator's blocks learn only from the generator's loss.
    learned = [
        named_leaves(
            jax.jit(jax.grad(lambda model, w=w: ReplacedTokens(w).loss(model, None, batch, key)[0]["loss"]))(
                model
            )
        )
        for w in (0.0, 50.0)
    ]
    names = [name for name in learned[0] if name.startswith("generator/") and "/blocks/" in name]
    assert names
    for name in names:
        np.testing.assert_allclose(learned[0][name], learned[1][name], rtol=1e-5, atol=1e-7)
