"""Scores of classes, label sets, numbers and tags, by scikit-learn and seqeval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np


def class_scores(
    predictions: Sequence[int], expected: Sequence[int], classes: int, *, positive: int = 1
) -> Iterator[tuple[str, float]]:
    """Compute the scores of predicted classes.

    Args:
      predictions: Predicted class numbers.
      expected: True class numbers.
      classes: Number of classes.
      positive: The class of `f1` if there are two classes.

    Yields:
      (name, value in percent): `accuracy`, `f1` (of `positive` for two classes, else macro over the classes
      that occur), `matthews`.
    """
    from sklearn import metrics  # takes a second to import

    yield "accuracy", 100 * float(metrics.accuracy_score(expected, predictions))
    options: dict[str, Any] = dict(average="macro")
    if classes == 2:
        options = dict(average="binary", pos_label=positive)
    f1 = metrics.f1_score(expected, predictions, **options, zero_division=0)
    yield "f1", 100 * float(f1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a set of one class has the coefficient 0
        yield "matthews", 100 * float(metrics.matthews_corrcoef(expected, predictions))


def label_set_scores(predictions: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, float]]:
    """Compute the scores of predicted label sets.

    Args:
      predictions: (N, C) 0 or 1.
      expected: (N, C) 0 or 1.

    Yields:
      (name, value in percent): `accuracy`, of texts whose labels are all correct, and `f1`, macro.
    """
    from sklearn import metrics

    yield "accuracy", 100 * float((predictions == expected).all(axis=1).mean())
    yield "f1", 100 * float(metrics.f1_score(expected, predictions, average="macro", zero_division=0))


def number_scores(predictions: Sequence[float], expected: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the correlations `spearman` and `pearson` in percent, 0 if one side is constant."""
    from scipy import stats

    for name, correlation in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(correlation(predictions, expected).statistic) if len(predictions) > 1 else 0.0
        yield name, 0.0 if math.isnan(value) else 100 * value


def are_entities(tags: Collection[str]) -> bool:
    """Return whether tags mark entities in BIO form: "O" or with a prefix such as "B-", which must occur."""
    has_begin = any(tag.startswith("B-") for tag in tags)
    return has_begin and all(tag == "O" or tag[1:2] == "-" for tag in tags)


def tag_scores(
    predictions: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], *, entities: bool
) -> Iterator[tuple[str, float]]:
    """Compute the scores of predicted tags of words.

    Args:
      predictions: Predicted tags of each text.
      expected: True tags of each text.
      entities: Result of `are_entities` for all tags.

    Yields:
      (name, value in percent): `accuracy` over words, and with `entities` the `entity_f1` of complete entities,
      0 if there are none.
    """
    texts = zip(predictions, expected, strict=True)
    pairs = [pair for predicted, true in texts for pair in zip(predicted, true, strict=True)]
    yield "accuracy", 100 * sum(predicted == true for predicted, true in pairs) / max(1, len(pairs))
    if entities:
        from seqeval.metrics import f1_score

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield (
                "entity_f1",
                100 * float(f1_score([list(t) for t in expected], [list(t) for t in predictions])),
            )
