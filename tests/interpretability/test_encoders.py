"""Values inside text encoders are returned and replaced, and their attention has its tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
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
    fields = {"embedding_width": 8, "generator_size": 1 / 3} if name == "electra" else {}
    entry = MODELS["masked_lm" if name != "electra" else "discriminator"][name]
    config = entry.config(
        vocab_size=vocab_size, width=D, layers=L, heads=H, feed_forward=17, max_length=19, **fields
    )
    model = jax.jit(lambda: entry.module(config, rngs=nnx.Rngs(0)))()
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), model)


@pytest.mark.parametrize("name", others_soak(["bert", "electra"], "bert"))
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
    # Ablating a head equals setting its rows of the output matrix to 0.
    ablated = replaced(lambda tokens: model(tokens), {"encoder/self_attention/heads": ablate_head(1, 2)})(
        tokens
    )
    kernel = model.encoder.blocks.self_attention.output.kernel
    values = kernel[...]
    head_width = D // H
    rows = values.reshape(L, -1, D).shape[1] // H
    assert rows == head_width
    kernel[...] = values.reshape(L, H, head_width, D).at[1, 2].set(0).reshape(values.shape)
    try:
        expected = model(tokens)
    finally:
        kernel[...] = values
    np.testing.assert_allclose(ablated, expected, atol=1e-5)
    assert np.abs(ablated - output).max() > 1e-3
    # Patching the last layer with the states of another text gives that text's output.
    other_tokens = jnp.asarray([[encoding.ids[0], *encoding.ids[-2:0:-1], encoding.ids[-1]]])
    other_output, other_seen = activations(model, other_tokens)
    patched = replaced(
        lambda tokens: model(tokens), {"encoder/residual": patch(1, other_seen["encoder/residual"])}
    )
    np.testing.assert_allclose(patched(tokens), other_output, atol=1e-5)


def test_attention_has_its_tokens(tokenizer, tmp_path):
    model = model_of("bert", tokenizer.vocab_size)
    (attention,) = attention_of_encoder(model, tokenizer, PAIR).values()
    assert attention.queries == attention.keys
    assert attention.queries[0] == "[CLS]"
    assert [token for token in attention.queries if token.startswith("[SEP]")] == ["[SEP]", "[SEP]"]
    # The tokens of the second text are marked.
    marked = [token.removesuffix(" ²") for token in attention.queries if token.endswith("²")]
    assert "".join(marked).replace("##", "") == PAIR[1].replace(" ", "")
    T = len(attention.queries)
    assert attention.weights.shape == (L, H, T, T)
    (encoding,) = tokenizer.encode_batch([PAIR], max_length=19)
    inputs = jnp.asarray([encoding.ids]), jnp.asarray([encoding.types])
    _, weights = model.encoder.hidden_states(inputs[0], types=inputs[1], return_weights=True)
    np.testing.assert_allclose(attention.weights, weights[0], atol=1e-6)
    assert entropy(attention.weights).shape == (L, H, T)
    np.testing.assert_allclose(rollout(attention.weights).sum(axis=-1), 1, atol=1e-5)
    AttentionPage({"encoder/self_attention": attention}, title="a pair").save(tmp_path / "page.html")
    assert "[SEP]" in (tmp_path / "page.html").read_text()


def test_words_are_tokenized_as_for_a_tagger():
    tokenizer = EncoderTokenizer.byte_pairs(["the dog runs, the dog sees"] * 3, 290)
    model = model_of("roberta", tokenizer.vocab_size)
    word_attention, text_attention = (
        next(iter(attention_of_encoder(model, tokenizer, text).values()))
        for text in (["the", "dog"], "the dog")
    )
    assert word_attention.keys == ["<s>", "Ġthe", "Ġdog", "</s>"]
    assert text_attention.keys[1] != "Ġthe"
    tokens = jnp.asarray([tokenizer.encode_batch([["the", "dog"]], max_length=19, words=True)[0].ids])
    _, weights = model.encoder.hidden_states(tokens, return_weights=True)
    np.testing.assert_allclose(word_attention.weights, weights[0], atol=1e-6)


def test_empty_and_long_texts_are_refused(tokenizer):
    model = model_of("bert", tokenizer.vocab_size)
    for text, message in ((" ", "empty"), (("a", ""), "empty"), ("the dog " * 20, "more tokens than")):
        with pytest.raises(UserError, match=message):
            attention_of_encoder(model, tokenizer, text)
