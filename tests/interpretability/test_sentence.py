"""The attention of sentences, the logit lens and induction scores."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_long
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
    "name", others_long(["transformer", "bahdanau", "luong", "hard_attention"], "transformer")
)
def test_a_translation_tells_all_its_attention(name, tokenizer):
    entry = TRANSLATORS[name]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size), rngs=nnx.Rngs(0))
    maps = attention_of_translation(model, tokenizer, "in 3 weeks", "in drei Wochen")
    kinds = ["decoder/cross_attention"]
    if name == "transformer":
        kinds = ["encoder/self_attention", "decoder/self_attention", *kinds]
    assert sorted(maps) == sorted(kinds)
    for one in maps.values():
        layers, heads = (2, 4) if name == "transformer" else (1, 1)
        assert one.weights.shape == (layers, heads, len(one.queries), len(one.keys))
        np.testing.assert_allclose(one.weights.sum(axis=-1), 1.0, atol=1e-5)
    assert "".join(maps["decoder/cross_attention"].keys[:-1]).replace("␣", "") == "in3weeks"
    source, target = ([*tokenizer.encode([text])[0], END] for text in ("in 3 weeks", "in drei Wochen"))
    _, expected = model(jnp.asarray([source]), jnp.asarray([[BEGIN, *target[:-1]]]), return_weights=True)
    np.testing.assert_allclose(maps["decoder/cross_attention"].weights, expected[0], atol=1e-6)


def test_a_single_layer_is_a_layer(tokenizer):
    entry = TRANSLATORS["transformer"]
    config = entry.preset("mini", tokenizer.vocab_size, encoder_layers=1, decoder_layers=1)
    maps = attention_of_translation(entry.module(config, rngs=nnx.Rngs(0)), tokenizer, "in 3 weeks", "ago")
    for one in maps.values():
        assert one.weights.shape == (1, 4, len(one.queries), len(one.keys))


def test_a_text_tells_all_its_attention():
    tokenizer = TextTokenizer.characters(["abcdefg hij"])
    entry = DECODERS["llama"]
    model = entry.module(entry.preset("mini", tokenizer.vocab_size), rngs=nnx.Rngs(0))
    maps = attention_of_text(model, tokenizer, "face bad")
    (one,) = maps.values()
    assert one.queries == one.keys == list("face bad")
    _, expected = model(jnp.asarray(tokenizer.encode(["face bad"])), return_weights=True)
    np.testing.assert_allclose(one.weights, expected[0], atol=1e-6)
    (ids,) = tokenizer.encode(["face bad"])
    (same,) = attention_of_text(model, tokenizer, ids).values()
    np.testing.assert_array_equal(same.weights, one.weights)
    with pytest.raises(UserError, match="the text is empty"):
        attention_of_text(model, tokenizer, "")
    with pytest.raises(UserError, match="above the model's limit of"):
        attention_of_text(model, tokenizer, "a" * 5000)


def test_models_without_attention_say_so(tokenizer):
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
    # A model that wrote nothing but its end has written something.
    (own,) = (
        one
        for kind, one in attention_of_translation(model, tokenizer, "in 3 weeks", [END]).items()
        if kind == "decoder/cross_attention"
    )
    assert own.queries == ["</s>"]


@pytest.mark.parametrize(
    ("name", "models"),
    others_long(
        [("gpt", DECODERS), ("llama", DECODERS), ("modern_gpt", DECODERS), ("transformer", TRANSLATORS)],
        ("llama", DECODERS),
        ("transformer", TRANSLATORS),
    ),
)
def test_the_lens_ends_with_the_models_logits(name, models):
    model = make(name, models)
    tokens = jnp.arange(10).reshape(2, 5) + 4
    given = (tokens, tokens) if models is TRANSLATORS else (tokens,)
    logits = logit_lens(model, *given)
    layers = model.config.decoder_layers if models is TRANSLATORS else model.config.layers
    same = logit_lens(model, *given, run=replaced(model, {"decoder/residual": lambda value, layer: value}))
    np.testing.assert_allclose(same, logits, atol=1e-6)
    assert logits.shape == (layers + 1, 2, 5, model.config.vocab_size)
    np.testing.assert_allclose(logits[-1], model(*given), atol=1e-5)
    assert np.abs(np.asarray(logits[0] - logits[-1])).max() > 1e-3
    with pytest.raises(ValueError, match="no value is named"):
        logit_lens(make("lstm", DECODERS), tokens)


def test_induction_is_the_diagonal_behind_the_repetition(rng):
    tokens = repeated_tokens(rng, 3, 4, 50)
    assert tokens.shape == (3, 8)
    np.testing.assert_array_equal(tokens[:, :4], tokens[:, 4:])
    # A head that looks at what followed the earlier copy, and one that looks at the token before.
    induction, before = np.zeros((8, 8)), np.zeros((8, 8))
    for query in range(8):
        induction[query, query - 3 if query > 2 else query] = 1.0
        before[query, max(query - 1, 0)] = 1.0
    weights = np.broadcast_to(np.stack([induction, before])[None, None], (1, 3, 2, 8, 8))
    np.testing.assert_array_equal(induction_scores(weights, 4), [[1.0, 0.0]])
    np.testing.assert_array_equal(previous_token_scores(weights), [[0.0, 1.0]])
    with pytest.raises(ValueError, match="a text of 8 tokens"):
        induction_scores(weights, 8)
