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
    """Probability of each segmentation, by going through every set of merges passed over at every turn."""
    possible = [(merges[pair], place) for place, pair in enumerate(itertools.pairwise(parts)) if pair in merges]
    found = collections.Counter()
    for kept in itertools.product([False, True], repeat=len(possible)):
        chance = np.prod([1 - rate if keep else rate for keep in kept])
        left = [merge for merge, keep in zip(possible, kept, strict=True) if keep]
        if not left:
            found[parts] += chance
            continue
        (_, whole), place = min(left)
        rest = exact_distribution((*parts[:place], whole, *parts[place + 2 :]), merges, rate)
        for segmentation, probability in rest.items():
            found[segmentation] += chance * probability
    return found


@pytest.mark.parametrize(("word", "rate"), [("lowest", 0.1), ("newest", 0.4), ("slow", 0.7)])
def test_segmentations_come_with_the_papers_probabilities(tokenizer, word, rate):
    letters, merges = tokenizer.merge_table()
    (pieces,) = tokenizer.words(word)
    expected = exact_distribution(tuple(letters[c] for c in pieces), merges, rate)
    assert sum(expected.values()) == pytest.approx(1)
    assert len(expected) > 3
    draws = 20_000
    encoded = BPEDropout(tokenizer, rate).encode([word] * draws, np.random.default_rng(0))
    seen = collections.Counter(map(tuple, encoded))
    assert seen.keys() <= expected.keys()
    for segmentation, probability in expected.items():
        spread = (probability * (1 - probability) / draws) ** 0.5
        assert abs(seen[segmentation] / draws - probability) < 5 * spread + 1e-4


def test_every_segmentation_spells_the_text(tokenizer):
    encoded = BPEDropout(tokenizer, 0.5).encode(TEXTS, np.random.default_rng(1))
    assert tokenizer.decode(encoded) == TEXTS
    assert encoded != tokenizer.encode(TEXTS)


def test_next_to_no_dropout_is_the_tokenizers_own(tokenizer):
    texts = [*TEXTS, "ünknown  letters <pad> 漢字"]
    assert BPEDropout(tokenizer, 1e-12).encode(texts, np.random.default_rng(0)) == tokenizer.encode(texts)


def test_the_generator_decides(tokenizer):
    dropout = BPEDropout(tokenizer, 0.3)
    first, again, other = (dropout.encode(TEXTS, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("rate", [0, 1, -0.1])
def test_a_rate_out_of_range(tokenizer, rate):
    with pytest.raises(ValueError, match="above 0 and below 1"):
        BPEDropout(tokenizer, rate)


def test_long_words_are_not_remembered(tokenizer):
    dropout = BPEDropout(tokenizer, 0.3)
    texts = ["lowest" * n for n in range(1, 30)]
    assert tokenizer.decode(dropout.encode(texts, np.random.default_rng(0))) == texts
    assert dropout._remembered.cache_info().currsize <= 4
