"""Scores of classes, label sets, numbers and tags, by scikit-learn and seqeval."""

from __future__ import annotations

import itertools
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


def probability_scores(probabilities: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, float]]:
    """Compute the area under the ROC curve.

    Args:
      probabilities: (N, C) predicted probability of each class.
      expected: (N,) true class numbers.

    Yields:
      ("roc_auc", value in percent), for more than two classes the mean over each class against the others.
      Classes that do not occur, or that alone occur, have no curve; without a curve there is no score.
    """
    from sklearn import metrics

    classes = (1,) if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [
        metrics.roc_auc_score(expected == number, probabilities[:, number])
        for number in classes
        if 0 < (expected == number).sum() < len(expected)
    ]
    if areas:
        yield "roc_auc", 100 * float(np.mean(areas))


def error_scores(predictions: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield the errors of predicted numbers (N,): `rmse` (root mean square) and `mae` (mean absolute)."""
    yield "rmse", float(np.sqrt(np.square(predictions - expected).mean()))
    yield "mae", float(np.abs(predictions - expected).mean())


def number_scores(predictions: Sequence[float], expected: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the correlations `spearman` and `pearson` in percent, 0 if one side is constant."""
    from scipy import stats

    for name, correlation in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(correlation(predictions, expected).statistic) if len(predictions) > 1 else 0.0
        yield name, 0.0 if math.isnan(value) else 100 * value


# Prefixes of each scheme of tags that mark entities.
SCHEMES = {"BIO": "BI", "IOB1": "BI", "BILOU": "BILU", "IOBES": "BIES", "IO": "I"}


def prefixes_of(tags: Collection[str]) -> str | None:
    """Return the sorted prefixes of tags such as "B-city", without "O"; None if a tag has none."""
    marks = set(tags) - {"O"}
    return "".join(sorted({tag[0] for tag in marks})) if all(tag[1:2] == "-" for tag in marks) else None


def tag_scheme(texts: Sequence[Sequence[str]]) -> str:
    """Detect the scheme of the tags of texts.

    In BIO (IOB2) every entity begins with B; in IOB1 only one that follows an entity of the same type; in IO
    none does. BILOU and IOBES mark the last word (L or E) and single words (U or S) as well.

    Args:
      texts: The tags of each text.

    Returns:
      A key of `SCHEMES`, or "" if the tags fit none.
    """
    prefixes = prefixes_of({tag for tags in texts for tag in tags})
    if not prefixes:
        return ""
    if prefixes == "I":
        return "IO"
    if set(prefixes) <= set("BI"):
        pairs = [pair for tags in texts for pair in itertools.pairwise(["O", *tags])]
        follows = [(tag[0], before[1:] == tag[1:] and before != "O") for before, tag in pairs if tag != "O"]
        if all(continues for prefix, continues in follows if prefix == "I"):
            return "BIO"
        return "IOB1" if all(continues for prefix, continues in follows if prefix == "B") else ""
    fitting = [name for name in ("BILOU", "IOBES") if set(prefixes) <= set(SCHEMES[name])]
    return fitting[0] if fitting and set(prefixes) & set("BUS") else ""


def tag_scores(
    predictions: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], *, scheme: str
) -> Iterator[tuple[str, float]]:
    """Compute the scores of predicted tags of words.

    Args:
      predictions: Predicted tags of each text.
      expected: True tags of each text.
      scheme: A key of `SCHEMES`, or "" for tags that do not mark entities.

    Yields:
      (name, value in percent): `accuracy` over words, and with a scheme the `entity_f1` of complete entities, 0
      if there are none. Tags that the scheme does not allow, such as I-city after O in BIO, begin no entity
      (`mode="strict"` of seqeval).
    """
    texts = zip(predictions, expected, strict=True)
    pairs = [pair for predicted, true in texts for pair in zip(predicted, true, strict=True)]
    yield "accuracy", 100 * sum(predicted == true for predicted, true in pairs) / max(1, len(pairs))
    if not scheme:
        return
    from seqeval import metrics
    from seqeval import scheme as schemes

    # seqeval has no IO; IOB1 scores tags without B- in the same way.
    scheme_type = getattr(schemes, {"BIO": "IOB2", "IO": "IOB1"}.get(scheme, scheme))
    options: dict[str, Any] = dict(mode="strict", scheme=scheme_type, zero_division=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f1 = metrics.f1_score([list(t) for t in expected], [list(t) for t in predictions], **options)
    yield "entity_f1", 100 * float(f1)
