"""Scores of captions and of retrieval against slow formulas."""

import collections
import math

import numpy as np
import pytest

from transformer_jax.evaluation.captions import caption_scores, cider_d, words_of
from transformer_jax.evaluation.retrieval import retrieval_scores

REFERENCES = [
    ["A dog runs on the grass .", "the brown dog is running", "A dog runs !"],
    ["Two children play in the snow .", "kids playing in snow"],
    ["A man rides a bicycle down a street .", "a cyclist on the street", "a man on a bike"],
    ["A black cat sits on a chair ."],
]
CAPTIONS = [
    "a dog runs on the snow",
    "two children play in the snow",
    "a man a man a man rides a horse down the long road",
    "birds",
]


def grams(words, order):
    return [tuple(words[n : n + order]) for n in range(len(words) - order + 1)]


def cider_oracle(captions, references):
    """Return CIDEr-D as in equations 1, 2 and 4 of the paper, over dense vectors of all n-grams."""
    total = 0.0
    for order in range(1, 5):
        vocabulary = sorted(
            {g for texts in references for t in texts for g in grams(words_of(t), order)}
            | {g for t in captions for g in grams(words_of(t), order)}
        )
        frequency = np.array(
            [
                sum(any(g in grams(words_of(t), order) for t in texts) for texts in references)
                for g in vocabulary
            ]
        )
        weight = np.log(len(references)) - np.log(np.maximum(frequency, 1))

        def vector(text, order=order, vocabulary=vocabulary, weight=weight):
            counts = collections.Counter(grams(words_of(text), order))
            return np.array([counts[g] for g in vocabulary]) * weight

        for caption, texts in zip(captions, references, strict=True):
            scores = []
            for text in texts:
                h, r = vector(caption), vector(text)
                norm = np.linalg.norm(h) * np.linalg.norm(r)
                difference = len(words_of(caption)) - len(words_of(text))
                cosine = np.minimum(h, r) @ r / norm if norm else 0.0
                scores.append(10 * math.exp(-(difference**2) / 72) * cosine)
            total += np.mean(scores) / 4
    return total / len(captions)


def bleu_oracle(captions, references, order):
    """Return BLEU with the closest reference's length (Papineni et al. 2002)."""
    logs, lengths = [], np.zeros(2)
    for n in range(1, order + 1):
        matches = count = 0
        for caption, texts in zip(captions, references, strict=True):
            counts = collections.Counter(grams(words_of(caption), n))
            limits = [collections.Counter(grams(words_of(text), n)) for text in texts]
            matches += sum(min(c, max(limit[g] for limit in limits)) for g, c in counts.items())
            count += sum(counts.values())
        logs.append(np.log(matches / count))
    for caption, texts in zip(captions, references, strict=True):
        size = len(words_of(caption))
        closest = min((abs(len(words_of(t)) - size), len(words_of(t))) for t in texts)[1]
        lengths += size, closest
    return 100 * min(1, np.exp(1 - lengths[1] / lengths[0])) * np.exp(np.mean(logs))


def test_words_have_no_case_and_no_punctuation():
    assert words_of("A man's 'big' dog, running ! ...") == ["a", "man's", "big", "dog", "running"]
    assert words_of("नमस्ते, दुनिया।") == ["नमस्ते", "दुनिया"]


def test_scores_equal_their_formulas():
    scores = dict(caption_scores(CAPTIONS, REFERENCES))
    assert scores["cider"] == pytest.approx(cider_oracle(CAPTIONS, REFERENCES), rel=1e-9)
    for order in range(1, 5):
        assert scores[f"bleu{order}"] == pytest.approx(bleu_oracle(CAPTIONS, REFERENCES, order), rel=1e-6)


def test_a_caption_equal_to_its_only_reference_has_the_highest_score():
    texts = ["a red bus on a road", "two dogs in the park", "a child eats an apple"]
    assert cider_d(texts, [[t] for t in texts]) == pytest.approx(10)
    assert dict(caption_scores(texts, [[t] for t in texts]))["bleu4"] == pytest.approx(100)
    shuffled = [[texts[1]], [texts[2]], [texts[0]]]
    assert cider_d(texts, shuffled) < 0.5


def test_an_empty_reference_is_refused():
    with pytest.raises(ValueError, match="2 captions for 2 images with references"):
        list(caption_scores(["a", "b"], [["a"], []]))


def recall_oracle(images, texts, image_of_text, k):
    """Return both recalls, ranking all candidates of each query."""
    similarity = images @ texts.T
    to_text = [
        any(image_of_text[t] == i for t in np.argsort(-similarity[i], kind="stable")[:k])
        for i in range(len(images))
    ]
    to_image = [image_of_text[t] in np.argsort(-similarity[:, t], kind="stable")[:k] for t in range(len(texts))]
    return 100 * np.mean(to_text), 100 * np.mean(to_image)


def test_recall_equals_a_ranking_of_all_candidates(rng):
    images = rng.normal(size=(40, 3))
    image_of_text = np.sort(np.concatenate([np.arange(40), rng.integers(0, 40, 50)]))
    texts = images[image_of_text] + rng.normal(size=(90, 3))
    scores = dict(retrieval_scores(images, texts, image_of_text))
    for k in (1, 5, 10):
        expected = recall_oracle(images, texts, image_of_text, k)
        values = (scores[f"image_to_text_recall_at_{k}"], scores[f"text_to_image_recall_at_{k}"])
        assert values == pytest.approx(expected)


def test_equal_vectors_find_nothing(rng):
    """Each product of equal vectors is rounded in another way."""
    vector = rng.normal(size=192).astype(np.float32)
    vectors = np.tile(vector / np.linalg.norm(vector), (1_500, 1))
    scores = dict(retrieval_scores(vectors, vectors, np.arange(1_500)))
    assert set(scores.values()) == {0.0}
