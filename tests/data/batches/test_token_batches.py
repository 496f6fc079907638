"""Rows of tokens: each token once per epoch, separate documents, and steps that depend only on the seed."""

import numpy as np
import pytest

from transformer_jax.data.batches.token_batches import (
    PackedDocuments,
    StreamWindows,
    TokenBatches,
    TokenizedDocuments,
    validation_windows,
)
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

TEXTS = ["aab ab", "b", "abba baa b abab aab", "", "aa"]


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.byte_pairs(TEXTS, 260)


@pytest.fixture(scope="module")
def documents(tokenizer):
    return TokenizedDocuments(TEXTS, tokenizer)


def test_a_stream_marks_the_ends_of_texts(documents, tokenizer):
    expected = [i for ids in tokenizer.encode(TEXTS) for i in (tokenizer.end, *ids)] + [tokenizer.end]
    assert documents.stream().tolist() == expected
    assert documents.text_bytes == sum(map(len, TEXTS))
    assert documents.tokens.dtype == np.uint16
    characters = TextTokenizer.characters(TEXTS)
    assert TokenizedDocuments(TEXTS, characters).stream().tolist() == characters.encode(["".join(TEXTS)])[0]


def test_windows_of_an_epoch_do_not_overlap():
    stream = np.arange(103, dtype=np.uint16)
    batches = TokenBatches(StreamWindows(stream, 7), 3, seed=1)
    assert batches.batches_per_epoch == 4  # of 14 windows, the random shift leaves 13
    first_tokens = []
    for epoch in range(3):
        epoch_batches = [batches[epoch * 4 + n] for n in range(4)]
        for batch in epoch_batches:
            assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
                "tokens": ((3, 7), np.int32), "targets": ((3, 7), np.int32), "weights": ((3, 7), np.float32),
            }  # fmt: skip
            np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
        tokens = np.concatenate([b["tokens"].ravel() for b in epoch_batches])
        assert len(set(tokens.tolist())) == len(tokens) == 84
        first_tokens.append(epoch_batches[0]["tokens"])
    assert not (first_tokens[0] == first_tokens[1]).all()


def test_steps_depend_only_on_seed_and_number():
    rows = StreamWindows(np.arange(500), 5)
    batches, again, other_seed = (TokenBatches(rows, 4, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(batches[37]["tokens"], again[37]["tokens"])
    assert (batches[37]["tokens"] != other_seed[37]["tokens"]).any()
    streamed = next(iter(again.from_step(37)))
    np.testing.assert_array_equal(batches[37]["tokens"], streamed["tokens"])


def test_a_text_smaller_than_a_batch_fills_it():
    batch = TokenBatches(StreamWindows(np.arange(9), 8), 3, seed=0)[0]
    assert batch["tokens"].tolist() == [list(range(8))] * 3
    with pytest.raises(UserError, match="a text of 8 tokens is shorter than one window of 8"):
        StreamWindows(np.arange(8), 8)


@pytest.mark.parametrize("length", [5, 8, 64])
def test_packed_documents_predict_every_token_once(documents, length):
    rows = PackedDocuments(documents, length, seed=0)
    order = rows.epoch(np.random.default_rng(0))
    batch = rows.batch(np.sort(order))
    predicted = {}
    for row in range(len(order)):
        for segment in range(1, batch["segments"][row].max() + 1):
            mask = batch["segments"][row] == segment
            assert (np.diff(np.flatnonzero(mask)) == 1).all()
            tokens, targets = batch["tokens"][row][mask], batch["targets"][row][mask]
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            predicted[row, segment] = [tokens[0], *targets]
    padding = batch["segments"] == 0
    assert (batch["weights"] == ~padding).all()
    pieces = []
    for number in range(len(documents)):
        ids = documents.document(number)
        pieces += [ids[n : n + length + 1].tolist() for n in range(0, len(ids) - 1, length)]
    assert sorted(predicted.values()) == sorted(pieces)


def test_validation_predicts_each_token_except_the_first_once():
    stream = np.arange(1, 52, dtype=np.uint16)
    batches = list(validation_windows(stream, 8, 3))
    assert [b["tokens"].shape for b in batches] == [(3, 8)] * 3
    targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert targets.tolist() == list(range(2, 52))
    rows = np.concatenate([b["tokens"] for b in batches])
    assert rows[1].tolist() == list(range(9, 17))
    with pytest.raises(UserError, match="fewer than two tokens"):
        list(validation_windows(stream[:1], 8, 3))


def test_no_document_of_two_tokens():
    documents = TokenizedDocuments(["a", ""], TextTokenizer.characters(["a"]))
    with pytest.raises(UserError, match="no document has two tokens"):
        PackedDocuments(documents, 8, seed=0)
