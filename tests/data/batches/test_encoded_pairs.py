import numpy as np
import pytest

from transformer_jax.data.batches.encoded_pairs import EncodedPairs, token_lengths
from transformer_jax.data.batches.pair_batches import TranslationBatches, packed_bucket
from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.data.tokenizers.byte_pairs import PAD, BytePairTokenizer

WORDS = ["low", "lower", "lowest", "newer", "newest", "wide", "wider", "widest"]


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairTokenizer.train([" ".join(WORDS)] * 5, 300)


@pytest.fixture
def pairs(rng):
    def sentence():
        return " ".join(rng.choice(WORDS, rng.integers(1, 9)))

    return [Pair(sentence(), sentence()) for _ in range(60)]


def test_examples_are_encoded_by_the_tokenizer(tokenizer, pairs):
    examples = EncodedPairs(pairs, tokenizer, max_length=100)
    assert len(examples) == 60
    ((first, second), (third,)) = examples.read([[5, 0], [7]], 100, [(0,), (1,)])
    for (source, target), index in ((first, 5), (second, 0), (third, 7)):
        assert [source, target] == tokenizer.encode(pairs[index])
        assert examples.lengths[index].tolist() == [len(source), len(target)]


def test_long_and_empty_pairs_are_dropped_and_counted(tokenizer):
    pairs = [Pair("low", "low"), Pair("low " * 9, "low"), Pair("low", " "), Pair("wide", "wide")]
    examples = EncodedPairs(pairs, tokenizer, max_length=8)
    assert (examples.too_long, examples.empty, examples.numbers.tolist()) == (1, 1, [0, 3])
    assert examples.read([[1]], 8, [(0,)])[0][0][0] == tokenizer.encode(["wide"])[0]


def test_a_pair_of_the_maximum_length_is_kept(tokenizer):
    length = len(tokenizer.encode(["low wide newer"])[0])
    pair = [Pair("low wide newer", "low")]
    assert len(EncodedPairs(pair, tokenizer, max_length=length + 1)) == 1
    assert len(EncodedPairs(pair, tokenizer, max_length=length)) == 0


def test_precomputed_lengths_equal_counted_ones(tokenizer, pairs):
    lengths = token_lengths(pairs, tokenizer)
    assert lengths.dtype == np.uint16
    precomputed = EncodedPairs(pairs, tokenizer, max_length=12, lengths=lengths)
    counted = EncodedPairs(pairs, tokenizer, max_length=12)
    np.testing.assert_array_equal(precomputed.numbers, counted.numbers)
    np.testing.assert_array_equal(precomputed.lengths, counted.lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_in_batches(tokenizer, pairs, packed):
    """Epochs segment the same sentences differently in the same shapes, and a step is reproducible."""
    examples = EncodedPairs(pairs, tokenizer, max_length=100, dropout=0.3)
    plain = EncodedPairs(pairs, tokenizer, max_length=100)
    assert (examples.lengths >= plain.lengths).all()
    assert examples.lengths.sum() > 1.1 * plain.lengths.sum()
    buckets = [packed_bucket(examples.lengths.max(axis=1) + 1, 200)]
    batches = TranslationBatches(examples, buckets, 0, packed=packed)
    words, token_counts = [], []
    for epoch in (0, 1):
        steps = range(epoch * batches.batches_per_epoch, (epoch + 1) * batches.batches_per_epoch)
        epoch_batches = [batches[step] for step in steps]
        for step, batch in zip(steps, epoch_batches, strict=True):
            for name, array in batches[step].items():
                np.testing.assert_array_equal(array, batch[name])
        rows = np.concatenate([batch["target_out"] for batch in epoch_batches])
        token_counts.append(int((rows != PAD).sum()))
        words.append(sorted(word for text in tokenizer.decode(rows) for word in text.split()))
    assert words[0] == words[1] == sorted(word for pair in pairs for word in pair.target.split(" "))
    assert token_counts[0] != token_counts[1]
    assert min(token_counts) > 1.1 * sum(len(ids) + 1 for ids in tokenizer.encode([p.target for p in pairs]))


def test_a_full_row_keeps_the_segmentation_without_dropout(tokenizer, pairs):
    examples = EncodedPairs(pairs, tokenizer, max_length=100, dropout=0.9)
    plain = tokenizer.encode([pairs[0].source, pairs[1].source])
    source_size = sum(len(ids) + 1 for ids in plain)
    target_size = sum(len(ids) + 1 for ids in tokenizer.encode([pairs[0].target, pairs[1].target]))
    (row,) = examples.read([[0, 1]], max(source_size, target_size), [(0,)])
    assert sum(len(source) + 1 for source, _ in row) <= max(source_size, target_size)
    assert tokenizer.decode([source for source, _ in row]) == [pairs[0].source, pairs[1].source]
