"""The attention of sentences, the logit lens and induction scores."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.interpretability.test_activations import make
from transformer_jax.data.tokenizers.byte_pairs import BEGIN, END, BytePairTokenizer
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.interpretability.activations import replaced
from transformer_jax.interpretability.induction import induction_scores, previous_token_scores, repeated_tokens
from transformer_jax.interpretability.logit_lens import logit_lens
from transformer_jax.interpretability.sentence import attention_of_text, attention_of_translation
from transformer_jax.models.registry import DECODERS, TRANSLATORS

TEXTS = ["in 3 weeks", "two weeks ago", "in drei Wochen", "vor zwei Wochen"]


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairTokenizer.train(TEXTS, 300)


@pytest.mark.parametrize(
    "name", others_soak(["transformer", "bahdanau", "luong", "hard_attention"], "transformer")
)
def test_all_attention_of_a_translation(name, tokenizer):
    entry = TRANSLATORS[name]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size), rngs=nnx.Rngs(0))
    maps = attention_of_translation(model, tokenizer, "in 3 weeks", "in drei Wochen")
    names = ["decoder/cross_attention"]
    if name == "transformer":
        names = ["encoder/self_attention", "decoder/self_attention", *names]
    assert sorted(maps) == sorted(names)
    for attention in maps.values():
        layers, heads = (2, 4) if name == "transformer" else (1, 1)
        assert attention.weights.shape == (layers, heads, len(attention.queries), len(attention.keys))
        np.testing.assert_allclose(attention.weights.sum(axis=-1), 1.0, atol=1e-5)
    assert "".join(maps["decoder/cross_attention"].keys[:-1]).replace("␣", "") == "in3weeks"
    source, target = ([*tokenizer.encode([text])[0], END] for text in ("in 3 weeks", "in drei Wochen"))
    _, expected = model(jnp.asarray([source]), jnp.asarray([[BEGIN, *target[:-1]]]), return_weights=True)
    np.testing.assert_allclose(maps["decoder/cross_attention"].weights, expected[0], atol=1e-6)


def test_a_model_with_one_layer_keeps_the_layer_axis(tokenizer):
    entry = TRANSLATORS["transformer"]
    config = entry.preset("mini", tokenizer.vocab_size, encoder_layers=1, decoder_layers=1)
    maps = attention_of_translation(entry.module(config, rngs=nnx.Rngs(0)), tokenizer, "in 3 weeks", "ago")
    for attention in maps.values():
        assert attention.weights.shape == (1, 4, len(attention.queries), len(attention.keys))


def test_all_attention_of_a_text():
    tokenizer = TextTokenizer.characters(["abcdefg hij"])
    entry = DECODERS["llama"]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size), rngs=nnx.Rngs(0))
    maps = attention_of_text(model, tokenizer, "face bad")
    (attention,) = maps.values()
    assert attention.queries == attention.keys == list("face bad")
    _, expected = model(jnp.asarray(tokenizer.encode(["face bad"])), return_weights=True)
    np.testing.assert_allclose(attention.weights, expected[0], atol=1e-6)
    (ids,) = tokenizer.encode(["face bad"])
    (repeated,) = attention_of_text(model, tokenizer, ids).values()
    np.testing.assert_array_equal(repeated.weights, attention.weights)
    with pytest.raises(UserError, match="the text is empty"):
        attention_of_text(model, tokenizer, "")
    with pytest.raises(UserError, match="above the model's limit of"):
        attention_of_text(model, tokenizer, "a" * 5000)


def test_models_and_texts_without_attention_are_refused(tokenizer):
    entry = TRANSLATORS["lstm"]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="Seq2Seq has no attention"):
        attention_of_translation(model, tokenizer, "in 3 weeks", "in drei Wochen")
    entry = TRANSLATORS["transformer"]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size, max_length=16), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="the translation is empty"):
        attention_of_translation(model, tokenizer, "in 3 weeks", "")
    with pytest.raises(UserError, match="the text has 32 tokens, above the model's limit of 16"):
        attention_of_translation(model, tokenizer, "x" * 30, "in drei Wochen")
    # A translation of only the end token is not empty.
    maps = attention_of_translation(model, tokenizer, "in 3 weeks", [END])
    assert maps["decoder/cross_attention"].queries == ["</s>"]


@pytest.mark.parametrize(
    ("name", "models"),
    others_soak(
        [("gpt", DECODERS), ("llama", DECODERS), ("modern_gpt", DECODERS), ("transformer", TRANSLATORS)],
        ("llama", DECODERS),
        ("transformer", TRANSLATORS),
    ),
)
def test_the_lens_ends_with_the_models_logits(name, models):
    model = make(name, models)
    tokens = jnp.arange(10).reshape(2, 5) + 4
    inputs = (tokens, tokens) if models is TRANSLATORS else (tokens,)
    logits = logit_lens(model, *inputs)
    layers = model.config.decoder_layers if models is TRANSLATORS else model.config.layers
    repeated = logit_lens(model, *inputs, run=replaced(model, {"decoder/residual": lambda value, layer: value}))
    np.testing.assert_allclose(repeated, logits, atol=1e-6)
    assert logits.shape == (layers + 1, 2, 5, model.config.vocab_size)
    np.testing.assert_allclose(logits[-1], model(*inputs), atol=1e-5)
    assert np.abs(np.asarray(logits[0] - logits[-1])).max() > 1e-3
    with pytest.raises(ValueError, match="no value is named"):
        logit_lens(make("lstm", DECODERS), tokens)


def test_scores_of_an_induction_head_and_a_previous_token_head(rng):
    tokens = repeated_tokens(rng, 3, 4, 50)
    assert tokens.shape == (3, 8)
    np.testing.assert_array_equal(tokens[:, :4], tokens[:, 4:])
    # One head attends to the token after the earlier copy, the other to the previous token.
    induction, previous = np.zeros((8, 8)), np.zeros((8, 8))
    for query in range(8):
        induction[query, query - 3 if query > 2 else query] = 1.0
        previous[query, max(query - 1, 0)] = 1.0
    weights = np.broadcast_to(np.stack([induction, previous])[None, None], (1, 3, 2, 8, 8))
    np.testing.assert_array_equal(induction_scores(weights, 4), [[1.0, 0.0]])
    np.testing.assert_array_equal(previous_token_scores(weights), [[0.0, 1.0]])
    with pytest.raises(ValueError, match="a text of 8 tokens"):
        induction_scores(weights, 8)
