import collections
import itertools

import numpy as np
import pytest

from transformer_jax.data.tokenizers.bpe_dropout import BPEDropout
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

TEXTS = ["low lower lowest newer newest wide wider widest", "slow slower slowest 12 125"] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairTokenizer.train(TEXTS, 290)


def exact_distribution(parts, merges, rate):
    """Return the probability of each segmentation, enumerating the dropped merges of every iteration."""
    possible = [(merges[pair], index) for index, pair in enumerate(itertools.pairwise(parts)) if pair in merges]
    distribution = collections.Counter()
    for kept in itertools.product([False, True], repeat=len(possible)):
        chance = np.prod([1 - rate if keep else rate for keep in kept])
        remaining = [merge for merge, keep in zip(possible, kept, strict=True) if keep]
        if not remaining:
            distribution[parts] += chance
            continue
        (_, merged), index = min(remaining)
        rest = exact_distribution((*parts[:index], merged, *parts[index + 2 :]), merges, rate)
        for segmentation, probability in rest.items():
            distribution[segmentation] += chance * probability
    return distribution


@pytest.mark.parametrize(("word", "rate"), [("lowest", 0.1), ("newest", 0.4), ("slow", 0.7)])
def test_segmentations_have_the_probabilities_of_the_paper(tokenizer, word, rate):
    letters, merges = tokenizer.merge_table()
    (pieces,) = tokenizer.words(word)
    expected = exact_distribution(tuple(letters[c] for c in pieces), merges, rate)
    assert sum(expected.values()) == pytest.approx(1)
    assert len(expected) > 3
    draws = 20_000
    encoded = BPEDropout(tokenizer, rate).encode([word] * draws, np.random.default_rng(0))
    counts = collections.Counter(map(tuple, encoded))
    assert counts.keys() <= expected.keys()
    for segmentation, probability in expected.items():
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[segmentation] / draws - probability) < 5 * deviation + 1e-4


def test_every_segmentation_spells_the_text(tokenizer):
    encoded = BPEDropout(tokenizer, 0.5).encode(TEXTS, np.random.default_rng(1))
    assert tokenizer.decode(encoded) == TEXTS
    assert encoded != tokenizer.encode(TEXTS)


def test_negligible_dropout_equals_the_tokenizer(tokenizer):
    texts = [*TEXTS, "ünknown  letters <pad> 漢字"]
    assert BPEDropout(tokenizer, 1e-12).encode(texts, np.random.default_rng(0)) == tokenizer.encode(texts)


def test_the_generator_determines_the_segmentation(tokenizer):
    dropout = BPEDropout(tokenizer, 0.3)
    encoded, again, other_seed = (dropout.encode(TEXTS, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert encoded == again != other_seed


@pytest.mark.parametrize("rate", [0, 1, -0.1])
def test_a_rate_outside_the_range(tokenizer, rate):
    with pytest.raises(ValueError, match="above 0 and below 1"):
        BPEDropout(tokenizer, rate)


def test_long_words_are_not_cached(tokenizer):
    dropout = BPEDropout(tokenizer, 0.3)
    texts = ["lowest" * n for n in range(1, 30)]
    assert tokenizer.decode(dropout.encode(texts, np.random.default_rng(0))) == texts
    assert dropout._cached_history.cache_info().currsize <= 4
