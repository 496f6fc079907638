"""Scores of classes, of several labels at once, of numbers and of tags, by scikit-learn and seqeval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np


def class_scores(
    found: Sequence[int], expected: Sequence[int], classes: int, *, positive: int = 1
) -> Iterator[tuple[str, float]]:
    """Scores of one label each.

    Args:
      found, expected: numbers of labels.
      classes: how many labels there are.
      positive: the label that `f1` is of where there are two.

    Yields:
      (name, value in percent): `accuracy`, `f1` (of `positive` where there are two labels, else macro over the
      labels that occur), `matthews`.
    """
    from sklearn import metrics  # an import of a second

    yield "accuracy", 100 * float(metrics.accuracy_score(expected, found))
    how: dict[str, Any] = dict(average="macro")
    if classes == 2:
        how = dict(average="binary", pos_label=positive)
    f1 = metrics.f1_score(expected, found, **how, zero_division=0)
    yield "f1", 100 * float(f1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a set of one class, whose coefficient is 0
        yield "matthews", 100 * float(metrics.matthews_corrcoef(expected, found))


def label_set_scores(found: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, float]]:
    """Scores of several labels at once.

    Args:
      found, expected: (N, C) 0 or 1.

    Yields:
      (name, value in percent): `accuracy`, of texts with every label right, and `f1`, macro.
    """
    from sklearn import metrics

    yield "accuracy", 100 * float((found == expected).all(axis=1).mean())
    yield "f1", 100 * float(metrics.f1_score(expected, found, average="macro", zero_division=0))


def number_scores(found: Sequence[float], expected: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Scores of numbers: `spearman` and `pearson`, correlations times 100; 0 where one side is constant."""
    from scipy import stats

    for name, correlation in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(correlation(found, expected).statistic) if len(found) > 1 else 0.0
        yield name, 0.0 if math.isnan(value) else 100 * value


def are_entities(tags: Collection[str]) -> bool:
    """Whether tags are B-, I- and O, of which the begin of an entity is one."""
    begins = any(tag.startswith("B-") for tag in tags)
    return begins and all(tag == "O" or tag[1:2] == "-" for tag in tags)


def tag_scores(
    found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], *, entities: bool
) -> Iterator[tuple[str, float]]:
    """Scores of tags of words.

    Args:
      found, expected: the tags of each text's words.
      entities: see `are_entities`, of all tags that there are.

    Yields:
      (name, value in percent): `accuracy` over words, and with `entities` `entity_f1`, of complete entities; 0
      where there are none.
    """
    pairs = [(f, e) for fs, es in zip(found, expected, strict=True) for f, e in zip(fs, es, strict=True)]
    yield "accuracy", 100 * sum(f == e for f, e in pairs) / max(1, len(pairs))
    if entities:
        from seqeval.metrics import f1_score

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield "entity_f1", 100 * float(f1_score([list(e) for e in expected], [list(f) for f in found]))
