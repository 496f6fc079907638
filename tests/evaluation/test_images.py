"""Scores of images against slow implementations of their formulas."""

import numpy as np
import pytest

from transformer_jax.evaluation.images import (
    confusion,
    feature_spread,
    image_scores,
    knn_accuracy,
    knn_votes,
)


def test_scores_of_a_classifier(rng):
    logits, labels = rng.normal(size=(37, 7)) * 3, rng.integers(7, size=37)
    scores = dict(image_scores(logits, labels))
    ranks = [sorted(range(7), key=lambda c, row=row: -row[c]) for row in logits]
    top_one = np.array([rank[0] == label for rank, label in zip(ranks, labels, strict=True)])
    assert scores["top1"] == pytest.approx(100 * top_one.mean())
    in_top_five = [label in rank[:5] for rank, label in zip(ranks, labels, strict=True)]
    assert scores["top5"] == pytest.approx(100 * np.mean(in_top_five))
    # Equation 3 of Guo et al. (2017) as a loop over the images.
    bins = [[] for _ in range(15)]
    for row, is_correct in zip(logits, top_one, strict=True):
        p = np.exp(row) / np.exp(row).sum()
        bins[min(14, int(p.max() * 15))].append((p.max(), is_correct))
    error = sum(
        len(group) / 37 * abs(np.mean([c for _, c in group]) - np.mean([p for p, _ in group]))
        for group in bins
        if group
    )
    assert scores["calibration_error"] == pytest.approx(100 * error)
    assert dict(image_scores(logits[:, :3], labels % 3))["top5"] == 100


def test_rows_of_the_confusion_matrix_are_true_classes():
    counts = confusion(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]), 3)
    np.testing.assert_array_equal(counts, [[1, 0, 0], [0, 1, 0], [0, 1, 1]])


def test_neighbors_vote_by_similarity(rng):
    known, labels = rng.normal(size=(23, 5)), rng.integers(4, size=23)
    queries = rng.normal(size=(11, 5))
    expected = np.zeros((11, 4))
    for row, query in enumerate(queries):
        cosines = [query @ x / np.linalg.norm(query) / np.linalg.norm(x) for x in known]
        for neighbor in sorted(range(23), key=lambda n: -cosines[n])[:6]:
            expected[row, labels[neighbor]] += np.exp(cosines[neighbor] / 0.07)
    votes = knn_votes(known, labels, queries, 4, k=6)
    np.testing.assert_allclose(votes, expected, rtol=1e-4)
    winners = expected.argmax(axis=1)
    assert knn_accuracy(known, labels, queries, winners, k=6) == 100
    assert knn_accuracy(known, labels, queries, (winners + 1) % 4, k=6) == 0
    # The length of a vector has no effect, and a k above the number of vectors takes all.
    np.testing.assert_allclose(knn_votes(known * 7, labels, queries, 4, k=6), votes, rtol=1e-4)
    assert knn_votes(known, labels, queries, 4, k=99).shape == (11, 4)


def test_spread_of_features(rng):
    assert feature_spread(np.ones((9, 4))) == pytest.approx(0)
    assert feature_spread(rng.normal(size=(4_000, 64))) == pytest.approx(1, abs=0.02)
