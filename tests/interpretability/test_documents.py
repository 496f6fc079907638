"""The attention of a document's first token, and its picture."""

import jax
import numpy as np
from flax import nnx

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.interpretability.documents import DocumentAttention, attention_of_document
from transformer_jax.interpretability.sentence import attention_of_encoder
from transformer_jax.models.registry import MODELS
from transformer_jax.plotting.documents import plot_document

WORDS = ["the", "dog", "sleeps", "under", "a", "tree", "while", "two", "cats", "play", "with", "rain"]


def test_weights_are_the_first_row_of_all_weights():
    tokenizer = EncoderTokenizer.wordpiece([" ".join(WORDS)], 100)
    text = " ".join(WORDS * 3)
    (encoded,) = tokenizer.encode_batch([text], max_length=200)
    for name in ("longformer", "bert"):
        entry = MODELS["sequence_classifier"][name]
        extra = {"window": 4} if name == "longformer" else {}
        config = entry.config(
            vocab_size=tokenizer.vocab_size, width=16, layers=2, heads=2, feed_forward=32, max_length=200,
            classes=3, **extra,
        )  # fmt: skip
        model = jax.jit(lambda entry=entry, config=config: entry.module(config, rngs=nnx.Rngs(0)))()
        attention = attention_of_document(model, tokenizer, encoded)
        dense = attention_of_encoder(model, tokenizer, encoded)["encoder/self_attention"]
        assert attention.weights.shape == (2, 2, len(encoded.ids))
        np.testing.assert_allclose(attention.weights, dense.weights[:, :, 0], atol=1e-6)
        np.testing.assert_allclose(attention.weights.sum(axis=-1), 1, atol=1e-5)


def test_passages_are_the_strongest_that_do_not_overlap(tmp_path):
    weights = np.full((1, 1, 30), 0.01, np.float32)
    weights[0, 0, [0, 7, 8, 20]] = 0.9, 0.2, 0.1, 0.25
    tokens = ["[CLS]", *(f"w{n}" for n in range(1, 29)), "[SEP]"]
    continues = np.zeros(30, bool)
    continues[8], tokens[8] = True, "##x"
    attention = DocumentAttention(tokens, weights, continues)
    passages = attention.passages(2, size=3)
    assert [text for _, _, text in passages] == ["w6 w7x", "w18 w19 w20"]
    np.testing.assert_allclose([share for share, _, _ in passages], [0.31, 0.27], atol=1e-6)
    assert len(attention.passages(50, size=3)) < 15
    bytes_of_words = DocumentAttention(
        ["<s>", "The", "\u0120do", "g", "</s>"], np.ones((1, 1, 5), np.float32), np.arange(5) == 3
    )
    assert bytes_of_words.passages(1)[0][2] == "The dog"
    empty = DocumentAttention(["<s>", "</s>"], np.ones((1, 1, 2), np.float32), np.zeros(2, bool))
    assert empty.passages(3) == []
    plot_document(attention, tmp_path / "document.png", title="a title " * 40)
    assert (tmp_path / "document.png").stat().st_size > 5_000
