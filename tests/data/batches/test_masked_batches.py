"""Rows of masked language modeling and their masks against counts by hand."""

import numpy as np
import pytest

from transformer_jax.data.batches.masked_batches import (
    EncodedDocuments,
    MaskedBatches,
    Masking,
    PackedPieces,
    SentencePairs,
)
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError

WORDS = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("", "rst", "ns")]


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, size=n)) for n in rng.integers(3, 90, 60)]


@pytest.fixture(scope="module")
def tokenizer(documents):
    return EncoderTokenizer.wordpiece(documents, 120)


@pytest.fixture(scope="module")
def encoded(documents, tokenizer):
    return EncodedDocuments(documents, tokenizer)


def unmasked(batch):
    """Return the rows before masking."""
    tokens = batch["tokens"].copy()
    row, slot = np.nonzero(batch["weights"])
    tokens[row, batch["positions"][row, slot]] = batch["labels"][row, slot]
    return tokens


def epoch_of(rows, tokenizer, **masking):
    return list(MaskedBatches(rows, 4, 0, tokenizer=tokenizer, masking=Masking(**masking)).once())


def test_packed_rows_hold_every_document_once(documents, tokenizer, encoded):
    T = 32
    rows = PackedPieces(encoded, T, 0, tokenizer)
    pieces, filled, size = [], 0, 0
    for batch in epoch_of(rows, tokenizer):
        for tokens, segments in zip(unmasked(batch), batch["segments"], strict=True):
            if not segments.any():
                continue  # an empty row of the last batch
            filled, size = filled + (segments > 0).sum(), size + T
            for number in range(1, segments.max() + 1):
                piece = tokens[segments == number]
                assert piece[0] == tokenizer.begin
                assert piece[-1] == tokenizer.separator
                pieces.append(tuple(piece[1:-1]))
            assert (tokens[segments == 0] == tokenizer.pad).all()
    expected = [
        tuple(ids[n : n + T - 2]) for ids in tokenizer.encode(documents) for n in range(0, len(ids), T - 2)
    ]
    assert sorted(pieces) == sorted(expected)
    assert filled / size == pytest.approx(rows.filled)
    assert rows.filled > 0.95


def test_masks(tokenizer, encoded):
    """15 % of the tokens are predicted: 80 % are masked, 10 % drawn from the vocabulary, 10 % unchanged."""
    rows = PackedPieces(encoded, 64, 0, tokenizer)
    batches = MaskedBatches(rows, 8, 1, tokenizer=tokenizer, masking=Masking())
    chosen = masked = unchanged = words = 0
    special = np.isin(np.arange(tokenizer.vocab_size), tokenizer.special_ids())
    for step in range(60):
        batch = batches[step]
        row, slot = np.nonzero(batch["weights"])
        positions, labels = batch["positions"][row, slot], batch["labels"][row, slot]
        assert len(set(zip(row.tolist(), positions.tolist(), strict=True))) == len(row)
        inputs = batch["tokens"][row, positions]
        assert not special[labels].any()
        assert not special[inputs[inputs != tokenizer.mask]].any()
        chosen += len(row)
        masked += (inputs == tokenizer.mask).sum()
        unchanged += (inputs == labels).sum()
        words += (~special[unmasked(batch)]).sum()
    assert chosen / words == pytest.approx(0.15, abs=0.005)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    # About 1 % of the drawn tokens equal the label by chance.
    assert unchanged / chosen == pytest.approx(0.1, abs=0.03)


def test_a_step_is_a_function_of_its_number(tokenizer, encoded):
    def open_batches():
        rows = PackedPieces(encoded, 32, 0, tokenizer)
        return MaskedBatches(rows, 4, 3, tokenizer=tokenizer, masking=Masking())

    batches, reopened = open_batches(), open_batches()
    for step in (0, 7, 41):
        expected = batches[step]
        for name, values in next(reopened.from_step(step)).items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    # The next epoch repeats the rows with other masks.
    size = batches.batches_per_epoch
    epochs = [[batches[n] for n in range(first, first + size)] for first in (0, size)]
    rows = [{tuple(r): p for b in e for r, p in zip(unmasked(b), b["positions"], strict=True)} for e in epochs]
    shared = set(rows[0]) & set(rows[1])
    assert len(shared) > 0.8 * len(rows[0])
    assert np.mean([np.array_equal(rows[0][r], rows[1][r]) for r in shared]) < 0.2


def test_whole_words(tokenizer, encoded):
    """Either all pieces of a word are chosen or none."""
    continues = np.array(tokenizer.continues_word())
    assert continues.any()
    partial_shares = {}
    for whole_words in (True, False):
        is_partial = []
        for batch in epoch_of(
            PackedPieces(encoded, 64, 0, tokenizer), tokenizer, whole_word_masking=whole_words
        ):
            for tokens, positions, weights in zip(
                unmasked(batch), batch["positions"], batch["weights"], strict=True
            ):
                # The first token of a piece of a document starts a word.
                follows_special = np.isin(np.roll(tokens, 1), tokenizer.special_ids())
                word = np.cumsum(~continues[tokens] | follows_special)
                chosen = np.isin(np.arange(len(tokens)), positions[weights > 0])
                counts = np.bincount(word, chosen)[word]
                is_partial += (counts != np.bincount(word)[word])[chosen].tolist()
        partial_shares[whole_words] = np.mean(is_partial)
    assert partial_shares[True] == 0
    assert partial_shares[False] > 0.2


def test_rows_of_padding_have_no_masked_tokens(tokenizer, encoded):
    rows = PackedPieces(encoded, 64, 0, tokenizer)
    last = epoch_of(rows, tokenizer)[-1]
    empty = ~last["segments"].any(axis=1)
    assert empty.any()
    assert not last["weights"][empty].any()
    assert last["weights"][~empty].any(axis=1).all()


def test_pairs(documents, tokenizer, encoded):
    """Half of the second texts follow the first in its document; the others come from another document."""
    T = 24
    half = (T - 3) // 2
    pieces = {}
    for number, ids in enumerate(tokenizer.encode(documents)):
        size = -(-len(ids) // 2) if 8 <= len(ids) <= half else half
        for n, begin in enumerate(range(0, len(ids), size)):
            pieces.setdefault(tuple(ids[begin : begin + size]), []).append((number, n))
    rows = SentencePairs(encoded, T, tokenizer)
    batches = MaskedBatches(rows, 8, 0, tokenizer=tokenizer, masking=Masking())
    labels = []
    for step in range(batches.batches_per_epoch):
        batch = batches[step]
        for tokens, types, segments, label in zip(
            unmasked(batch), batch["types"], batch["segments"], batch["next_label"], strict=True
        ):
            tokens, types = tokens[segments > 0], types[segments > 0]
            end = int(np.flatnonzero(tokens == tokenizer.separator)[0])
            assert tokens[0] == tokenizer.begin
            assert types.tolist() == [0] * (end + 1) + [1] * (len(tokens) - end - 1)
            first, second = pieces[tuple(tokens[1:end])], pieces[tuple(tokens[end + 1 : -1])]
            follows = any((d, n + 1) in second for d, n in first)
            from_another = any(d != e for d, _ in first for e, _ in second)
            assert from_another if label else follows
            assert any(n > 0 for _, n in second), "the start of a document would reveal that it follows nothing"
            labels.append(int(label))
    assert np.mean(labels) == pytest.approx(0.5, abs=0.1)


def test_too_little_text(tokenizer):
    with pytest.raises(UserError, match="no token"):
        PackedPieces(EncodedDocuments(["", " "], tokenizer), 32, 0, tokenizer)
    with pytest.raises(UserError, match="two documents of more than 4 tokens"):
        SentencePairs(EncodedDocuments(["ba be", "bi bo"], tokenizer), 32, tokenizer)


def test_pairs_of_little_text(tokenizer):
    """Short documents give short pieces; in one document, a random pair joins pieces that are not adjacent."""
    words = [f"b{a}{b} " for a in "aeiou" for b in "aeiou"]
    pairs = SentencePairs(EncodedDocuments(["".join(words)], tokenizer), 15, tokenizer)
    rows = pairs.epoch(np.random.default_rng(0))
    firsts, seconds = np.divmod(rows // 2, len(pairs._pieces))
    assert ((seconds == firsts + 1) == (rows % 2 == 0)).all()
    assert {0, 1} == set((rows % 2).tolist())
    texts = ["".join(words[n : n + 6]) for n in (0, 6, 12)]
    pairs = SentencePairs(EncodedDocuments([*texts, "ba"], tokenizer), 64, tokenizer)
    assert pairs.left_out == 1
    batch = pairs.batch(pairs.epoch(np.random.default_rng(0)))
    assert batch["tokens"].shape[1] == 64
    assert batch["segments"].sum() > 0


def test_short_documents_among_long_ones_are_split_in_two(tokenizer):
    """A document that fits into half a row would otherwise be a single piece without a pair."""
    words = [f"b{a}{b} " for a in "aeiou" for b in "aeiou"]
    texts = ["".join(words * 8)] * 2 + ["".join(words[n : n + 5]) for n in range(20)] + ["ba"]
    documents = EncodedDocuments(texts, tokenizer)
    sizes = np.diff(documents.starts)
    assert sizes[2:-1].min() >= 8
    assert sizes[2:-1].max() <= (64 - 3) // 2
    rows = SentencePairs(documents, 64, tokenizer)
    assert rows.left_out == 1
    first, second = (rows._pieces[rows._firsts + n] for n in (0, 1))
    assert set(first[:, 0]) == set(range(22))
    short = first[:, 0] > 1
    np.testing.assert_array_equal(first[short, 2] + second[short, 2], sizes[2:-1])
    assert (first[short, 2] - second[short, 2] <= 1).all()
    assert rows.filled == pytest.approx((first[:, 2] + second[:, 2] + 3).mean() / 64)


def test_one_long_document_among_short_ones(tokenizer):
    """Short documents are not overrepresented among random second texts, which would reveal the label."""
    words = [f"b{a}{b} " for a in "aeiou" for b in "aeiou"]
    texts = ["".join(words * 400), "".join(words), "".join(words)]
    rows = SentencePairs(EncodedDocuments(texts, tokenizer), 33, tokenizer)
    drawn = np.concatenate([rows.epoch(np.random.default_rng(n)) for n in range(30)])
    firsts, seconds = np.divmod(drawn // 2, len(rows._pieces))
    random = drawn % 2 == 1
    assert random.mean() == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(seconds == firsts + 1, ~random)
    first_text, second_text = rows._pieces[firsts, 0], rows._pieces[seconds, 0]
    share = (rows._pieces[rows._firsts, 0] > 0).mean()
    assert (second_text[random & (first_text == 0)] > 0).mean() == pytest.approx(share, abs=0.01)
    assert (second_text[random & (first_text > 0)] != first_text[random & (first_text > 0)]).all()
    assert (random & (first_text > 0)).any()


def test_validation_pairs_come_from_every_document(encoded, tokenizer):
    """Validation reads each pair once, or a fixed sample from the complete text."""
    rows = SentencePairs(encoded, 24, tokenizer)
    batches = MaskedBatches(rows, 8, 0, tokenizer=tokenizer, masking=Masking())
    order = rows.once()
    firsts = order // 2 // len(rows._pieces)
    assert sorted(firsts) == sorted(rows._firsts)
    documents = rows._pieces[firsts, 0]
    sample = list(batches.once(len(order) // 16))
    sample_size = len(sample) * 8
    assert len(order) / 3 < sample_size < 2 * len(order) / 3
    # A sample in the order of the text would miss the last third of the documents.
    assert np.mean(documents[:sample_size] >= 40) == pytest.approx(np.mean(documents >= 40), abs=0.1)
    for number, (batch, again) in enumerate(zip(sample, batches.once(), strict=False)):
        expected = rows.batch(order[8 * number : 8 * number + 8])
        np.testing.assert_array_equal(unmasked(batch), expected["tokens"])
        np.testing.assert_array_equal(batch["next_label"], expected["next_label"])
        for name, values in batch.items():
            np.testing.assert_array_equal(values, again[name], err_msg=name)


@pytest.mark.parametrize("texts", [[], ["\u4f60 \u597d"]])
def test_a_text_without_a_token_to_predict_is_refused(tokenizer, texts):
    """An empty text and one of unknown words would have a loss of 0."""
    with pytest.raises(UserError, match="the validation text has no token to predict"):
        EncodedDocuments(texts, tokenizer, "validation text")
