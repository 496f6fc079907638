"""Targets of labeled tables: a class, several classes at once, or a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.tables import Table
from transformer_jax.errors import UserError

# Columns to predict, of which the first in a table is the default.
TARGETS = ("label", "labels", "score")


def target_of(table: Table, target: str) -> str:
    """Return the column to predict: "label", "labels" or "score".

    Raises:
      UserError: The table has no such column, or not the one that `target` names.
    """
    candidates = TARGETS if target == "auto" else (target,)
    column = next((name for name in candidates if name in table.columns), None)
    if column is None:
        raise UserError(f"{table.path}: no column {' or '.join(candidates)} to predict")
    return column


def _sort_key(label: str) -> tuple[int, float, str]:
    """Return a key that sorts numbers by value before words; NaN, which has no order, is a word."""
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    return (1, 0.0, label) if math.isnan(number) else (0, number, label)


def positive_label(labels: Sequence[str]) -> str:
    """Return the positive class for F1: "1" if it is a label, otherwise the second label in sorted order."""
    return "1" if "1" in labels else sorted(labels, key=_sort_key)[1]


def labels_of(table: Table, target: str) -> tuple[str, ...]:
    """Return the classes of a training set, numbers by value and words by alphabet; ("score",) for scores.

    Raises:
      UserError: There are fewer than two classes, or all scores are equal.
    """
    values = table.columns[target]
    if target == "score":
        if len(values) > 1 and len({value.strip() for value in values}) == 1:
            raise UserError(f"{table.path}: every score is {values[0]!r}: there is nothing to learn")
        return ("score",)
    if target == "labels":
        labels = {label for value in values for label in value.split()}
        if len(labels) < 2:
            content = f"has only {next(iter(labels))!r}" if labels else "is empty"
            raise UserError(
                f"{table.path}: the column labels {content}, and several labels at once need two; for yes or "
                "no write a column label"
            )
    else:
        labels = {value.strip() for value in values} - {""}
        if not labels:
            raise UserError(f"{table.path}: no row has a label")
        if len(labels) < 2:
            raise UserError(f"{table.path}: every label is {next(iter(labels))!r}: classes need two")
    return tuple(sorted(labels, key=_sort_key))


def targets_of(table: Table, target: str, labels: Sequence[str]) -> list[Any]:
    """Return the target of each row, a number or an array.

    Raises:
      UserError: The column is missing, a row has no label, a label was not in training, or a score is not a
        number.
    """
    if target not in table.columns:
        raise UserError(f"{table.path}: no column {target}, which the training set has")
    numbers = {label: n for n, label in enumerate(labels)}
    targets: list[Any] = []
    for row, value in enumerate(table.columns[target]):
        if target == "score":
            try:
                score = float(value)
            except ValueError:
                score = math.nan
            if not abs(score) <= np.finfo(np.float32).max:
                raise UserError(f"{table.location(row)}: the score {value!r} is not a number")
            targets.append(np.float32(score))
            continue
        row_labels = value.split() if target == "labels" else [value.strip()]
        if row_labels == [""]:
            raise UserError(f"{table.location(row)}: no label")
        unknown = [label for label in row_labels if label not in numbers]
        if unknown:
            raise UserError(
                f"{table.location(row)}: the label {unknown[0]!r} was not in training, which has "
                f"{', '.join(list(labels)[:8])}"
            )
        if target == "labels":
            multi_hot = np.zeros(len(labels), np.float32)
            multi_hot[[numbers[label] for label in row_labels]] = 1
            targets.append(multi_hot)
        else:
            targets.append(np.int32(numbers[row_labels[0]]))
    return targets
