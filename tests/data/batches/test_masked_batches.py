"""Rows of pretraining and their masks, against counting by hand."""

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
    """The rows before words were masked."""
    tokens = batch["tokens"].copy()
    row, place = np.nonzero(batch["weights"])
    tokens[row, batch["positions"][row, place]] = batch["labels"][row, place]
    return tokens


def whole_epoch(rows, tokenizer, **masking):
    return list(MaskedBatches(rows, 4, 0, tokenizer=tokenizer, masking=Masking(**masking)).once())


def test_packed_rows_hold_every_document_once(documents, tokenizer, encoded):
    T = 32
    rows = PackedPieces(encoded, T, 0, tokenizer)
    pieces, filled, places = [], 0, 0
    for batch in whole_epoch(rows, tokenizer):
        for tokens, segments in zip(unmasked(batch), batch["segments"], strict=True):
            if not segments.any():
                continue  # what fills the last batch up
            filled, places = filled + (segments > 0).sum(), places + T
            for number in range(1, segments.max() + 1):
                own = tokens[segments == number]
                assert own[0] == tokenizer.begin
                assert own[-1] == tokenizer.separator
                pieces.append(tuple(own[1:-1]))
            assert (tokens[segments == 0] == tokenizer.pad).all()
    expected = [
        tuple(ids[n : n + T - 2]) for ids in tokenizer.encode(documents) for n in range(0, len(ids), T - 2)
    ]
    assert sorted(pieces) == sorted(expected)
    assert filled / places == pytest.approx(rows.filled)
    assert rows.filled > 0.95


def test_masks(tokenizer, encoded):
    """15 % of the words, of which 80 % masked, 10 % drawn from the vocabulary, 10 % as they were."""
    rows = PackedPieces(encoded, 64, 0, tokenizer)
    batches = MaskedBatches(rows, 8, 1, tokenizer=tokenizer, masking=Masking())
    chosen = masked = same = words = 0
    special = np.isin(np.arange(tokenizer.vocab_size), tokenizer.special_ids())
    for step in range(60):
        batch = batches[step]
        row, place = np.nonzero(batch["weights"])
        at, labels = batch["positions"][row, place], batch["labels"][row, place]
        assert len(set(zip(row.tolist(), at.tolist(), strict=True))) == len(row)
        now = batch["tokens"][row, at]
        assert not special[labels].any()
        assert not special[now[now != tokenizer.mask]].any()
        chosen, masked, same = (
            chosen + len(row),
            masked + (now == tokenizer.mask).sum(),
            same + (now == labels).sum(),
        )
        words += (~special[unmasked(batch)]).sum()
    assert chosen / words == pytest.approx(0.15, abs=0.005)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    # A tenth is left as it was; of the drawn ones one in a hundred or so is drawn right.
    assert same / chosen == pytest.approx(0.1, abs=0.03)


def test_a_step_is_a_function_of_its_number(tokenizer, encoded):
    def made():
        rows = PackedPieces(encoded, 32, 0, tokenizer)
        return MaskedBatches(rows, 4, 3, tokenizer=tokenizer, masking=Masking())

    one, other = made(), made()
    for step in (0, 7, 41):
        expected = one[step]
        for name, values in next(other.from_step(step)).items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    # The same rows come again in the next epoch, with other masks.
    epochs = [[one[n] for n in range(at, at + one.batches_per_epoch)] for at in (0, one.batches_per_epoch)]
    rows = [{tuple(r): p for b in e for r, p in zip(unmasked(b), b["positions"], strict=True)} for e in epochs]
    shared = set(rows[0]) & set(rows[1])
    assert len(shared) > 0.8 * len(rows[0])
    assert np.mean([np.array_equal(rows[0][r], rows[1][r]) for r in shared]) < 0.2


def test_whole_words(tokenizer, encoded):
    """A word has all of its pieces chosen, or none."""
    continues = np.array(tokenizer.continues_word())
    assert continues.any()
    partly = {}
    for whole in (True, False):
        found = []
        for batch in whole_epoch(PackedPieces(encoded, 64, 0, tokenizer), tokenizer, whole_words=whole):
            for tokens, places, weights in zip(
                unmasked(batch), batch["positions"], batch["weights"], strict=True
            ):
                begun = np.isin(
                    np.roll(tokens, 1), tokenizer.special_ids()
                )  # a piece of a document begins a word
                word = np.cumsum(~continues[tokens] | begun)
                chosen = np.isin(np.arange(len(tokens)), places[weights > 0])
                counts = np.bincount(word, chosen)[word]
                found += (counts != np.bincount(word)[word])[chosen].tolist()
        partly[whole] = np.mean(found)
    assert partly[True] == 0
    assert partly[False] > 0.2


def test_a_row_of_padding_alone_has_no_words(tokenizer, encoded):
    rows = PackedPieces(encoded, 64, 0, tokenizer)
    last = whole_epoch(rows, tokenizer)[-1]
    empty = ~last["segments"].any(axis=1)
    assert empty.any()
    assert not last["weights"][empty].any()
    assert last["weights"][~empty].any(axis=1).all()


def test_pairs(documents, tokenizer, encoded):
    """Half of the second texts follow the first in their document; the others are of another one."""
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
            own, kinds = tokens[segments > 0], types[segments > 0]
            end = int(np.flatnonzero(own == tokenizer.separator)[0])
            assert own[0] == tokenizer.begin
            assert kinds.tolist() == [0] * (end + 1) + [1] * (len(own) - end - 1)
            first, second = pieces[tuple(own[1:end])], pieces[tuple(own[end + 1 : -1])]
            follows = any((d, n + 1) in second for d, n in first)
            others = any(d != e for d, _ in first for e, _ in second)
            assert others if label else follows
            assert any(n > 0 for _, n in second), "a beginning would show that it follows nothing"
            labels.append(int(label))
    assert np.mean(labels) == pytest.approx(0.5, abs=0.1)


def test_too_little_text(tokenizer):
    with pytest.raises(UserError, match="no token"):
        PackedPieces(EncodedDocuments(["", " "], tokenizer), 32, 0, tokenizer)
    with pytest.raises(UserError, match="two documents of more than 4 tokens"):
        SentencePairs(EncodedDocuments(["ba be", "bi bo"], tokenizer), 32, tokenizer)


def test_pairs_of_little_text(tokenizer):
    """Pieces are as short as the documents ask for; of one document the random ones are from another place."""
    words = [f"b{a}{b} " for a in "aeiou" for b in "aeiou"]
    one = SentencePairs(EncodedDocuments(["".join(words)], tokenizer), 15, tokenizer)
    rows = one.epoch(np.random.default_rng(0))
    firsts, seconds = np.divmod(rows // 2, len(one._pieces))
    assert ((seconds == firsts + 1) == (rows % 2 == 0)).all()
    assert {0, 1} == set((rows % 2).tolist())
    short = ["".join(words[n : n + 6]) for n in (0, 6, 12)]
    several = SentencePairs(EncodedDocuments([*short, "ba"], tokenizer), 64, tokenizer)
    assert several.left_out == 1
    batch = several.batch(several.epoch(np.random.default_rng(0)))
    assert batch["tokens"].shape[1] == 64
    assert batch["segments"].sum() > 0


def test_short_documents_are_learned_beside_long_ones(tokenizer):
    """Cut in two each, where a piece of half a row would be all of it."""
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


def test_one_long_document_beside_short_ones(tokenizer):
    """A piece of the rest would tell by itself that it follows nothing: it is as rare as it is in the text."""
    words = [f"b{a}{b} " for a in "aeiou" for b in "aeiou"]
    texts = ["".join(words * 400), "".join(words), "".join(words)]
    rows = SentencePairs(EncodedDocuments(texts, tokenizer), 33, tokenizer)
    drawn = np.concatenate([rows.epoch(np.random.default_rng(n)) for n in range(30)])
    firsts, seconds = np.divmod(drawn // 2, len(rows._pieces))
    random = drawn % 2 == 1
    assert random.mean() == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(seconds == firsts + 1, ~random)
    own, other = rows._pieces[firsts, 0], rows._pieces[seconds, 0]
    share = (rows._pieces[rows._firsts, 0] > 0).mean()
    assert (other[random & (own == 0)] > 0).mean() == pytest.approx(share, abs=0.01)
    assert (other[random & (own > 0)] != own[random & (own > 0)]).all()
    assert (random & (own > 0)).any()


def test_what_is_validated_of_pairs_is_from_every_document(encoded, tokenizer):
    """A part of them, as of a long text, and all of them once; the same pairs each time."""
    rows = SentencePairs(encoded, 24, tokenizer)
    batches = MaskedBatches(rows, 8, 0, tokenizer=tokenizer, masking=Masking())
    order = rows.once()
    firsts = order // 2 // len(rows._pieces)
    assert sorted(firsts) == sorted(rows._firsts)
    documents = rows._pieces[firsts, 0]
    part = list(batches.once(len(order) // 16))
    read = len(part) * 8
    assert len(order) / 3 < read < 2 * len(order) / 3
    # In the order of the text none would be of the last third of the documents.
    assert np.mean(documents[:read] >= 40) == pytest.approx(np.mean(documents >= 40), abs=0.1)
    for number, (one, other) in enumerate(zip(part, batches.once(), strict=False)):
        expected = rows.batch(order[8 * number : 8 * number + 8])
        np.testing.assert_array_equal(unmasked(one), expected["tokens"])
        np.testing.assert_array_equal(one["next_label"], expected["next_label"])
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize("texts", [[], ["\u4f60 \u597d"]])
def test_a_text_without_a_word_to_predict_is_refused(tokenizer, texts):
    """None, or none that the vocabulary has: its loss would be 0."""
    with pytest.raises(UserError, match="the validation text has no token that could be predicted"):
        EncodedDocuments(texts, tokenizer, "validation text")
