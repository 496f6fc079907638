"""Values inside text encoders returned and replaced, and attention with the tokens that it is of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_long
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.interpretability.ablation import ablate_head, patch
from transformer_jax.interpretability.activations import activations, replaced
from transformer_jax.interpretability.attention_flow import entropy, rollout
from transformer_jax.interpretability.sentence import attention_of_encoder
from transformer_jax.models.registry import MODELS
from transformer_jax.plotting.attention_page import AttentionPage

TEXT, PAIR = "the dog sees a cat", ("the dog", "a cat sees it")
L, H, D = 2, 3, 12


@pytest.fixture(scope="module")
def tokenizer():
    return EncoderTokenizer.wordpiece([TEXT, *PAIR], 110)


@functools.cache
def model_of(name, vocab_size):
    own = {"embedding_width": 8, "generator_size": 1 / 3} if name == "electra" else {}
    entry = MODELS["masked_lm" if name != "electra" else "discriminator"][name]
    config = entry.config(
        vocab_size=vocab_size, width=D, layers=L, heads=H, feed_forward=17, max_length=19, **own
    )
    model = jax.jit(lambda: entry.module(config, rngs=nnx.Rngs(0)))()
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), model)


@pytest.mark.parametrize("name", others_long(["bert", "electra"], "bert"))
def test_values_inside(name, tokenizer):
    model = model_of(name, tokenizer.vocab_size)
    (encoding,) = tokenizer.encode_batch([TEXT], max_length=19)
    tokens = jnp.asarray([encoding.ids])
    T = tokens.shape[1]
    output, seen = activations(model, tokens)
    np.testing.assert_allclose(output, model(tokens), atol=1e-5)
    shapes = {key: seen[f"encoder/{key}"].shape for key in ("embedding", "self_attention/weights", "residual")}
    assert shapes == {
        "embedding": (1, T, D), "self_attention/weights": (L, 1, H, T, T), "residual": (L, 1, T, D),
    }  # fmt: skip
    # Without a head's output: what the oracle gets by leaving its rows out of the output matrix.
    ablated = replaced(lambda tokens: model(tokens), {"encoder/self_attention/heads": ablate_head(1, 2)})(
        tokens
    )
    path = model.encoder.blocks.self_attention.output.kernel
    before = path[...]
    width = D // H
    rows = before.reshape(L, -1, D).shape[1] // H
    assert rows == width
    path[...] = before.reshape(L, H, width, D).at[1, 2].set(0).reshape(before.shape)
    try:
        expected = model(tokens)
    finally:
        path[...] = before
    np.testing.assert_allclose(ablated, expected, atol=1e-5)
    assert np.abs(ablated - output).max() > 1e-3
    # The last layer's states of another text give that text's output.
    other = jnp.asarray([[encoding.ids[0], *encoding.ids[-2:0:-1], encoding.ids[-1]]])
    theirs, inside = activations(model, other)
    patched = replaced(lambda tokens: model(tokens), {"encoder/residual": patch(1, inside["encoder/residual"])})
    np.testing.assert_allclose(patched(tokens), theirs, atol=1e-5)


def test_attention_has_its_tokens(tokenizer, tmp_path):
    model = model_of("bert", tokenizer.vocab_size)
    (found,) = attention_of_encoder(model, tokenizer, PAIR).values()
    assert found.queries == found.keys
    assert found.queries[0] == "[CLS]"
    assert [token for token in found.queries if token.startswith("[SEP]")] == ["[SEP]", "[SEP]"]
    # The second text's tokens, of type 1, have a mark.
    marked = [token.removesuffix(" ²") for token in found.queries if token.endswith("²")]
    assert "".join(marked).replace("##", "") == PAIR[1].replace(" ", "")
    T = len(found.queries)
    assert found.weights.shape == (L, H, T, T)
    (encoding,) = tokenizer.encode_batch([PAIR], max_length=19)
    given = jnp.asarray([encoding.ids]), jnp.asarray([encoding.types])
    _, weights = model.encoder.hidden_states(given[0], types=given[1], return_weights=True)
    np.testing.assert_allclose(found.weights, weights[0], atol=1e-6)
    assert entropy(found.weights).shape == (L, H, T)
    np.testing.assert_allclose(rollout(found.weights).sum(axis=-1), 1, atol=1e-5)
    AttentionPage({"encoder/self_attention": found}, title="a pair").save(tmp_path / "page.html")
    assert "[SEP]" in (tmp_path / "page.html").read_text()


def test_words_are_shown_as_a_tagger_reads_them():
    tokenizer = EncoderTokenizer.byte_pairs(["the dog runs, the dog sees"] * 3, 290)
    model = model_of("roberta", tokenizer.vocab_size)
    words, text = (
        next(iter(attention_of_encoder(model, tokenizer, given).values()))
        for given in (["the", "dog"], "the dog")
    )
    assert words.keys == ["<s>", "Ġthe", "Ġdog", "</s>"]
    assert text.keys[1] != "Ġthe"
    tokens = jnp.asarray([tokenizer.encode_batch([["the", "dog"]], max_length=19, words=True)[0].ids])
    _, weights = model.encoder.hidden_states(tokens, return_weights=True)
    np.testing.assert_allclose(words.weights, weights[0], atol=1e-6)


def test_texts_that_cannot_be_shown(tokenizer):
    model = model_of("bert", tokenizer.vocab_size)
    for text, message in ((" ", "empty"), (("a", ""), "empty"), ("the dog " * 20, "more tokens than")):
        with pytest.raises(UserError, match=message):
            attention_of_encoder(model, tokenizer, text)
