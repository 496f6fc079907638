"""Figures of confusion matrices."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.matrix import plot_matrices


def plot_confusion(
    counts: Any, labels: Sequence[str], path: str | pathlib.Path | None = None, *, title: str = ""
) -> Figure:
    """Draw a confusion matrix as percentages of the true classes.

    Args:
      counts: Counts (C, C), with a row per true class and a column per predicted class.
      labels: Names of the C classes.
      path: File to write; its extension selects the format.
      title: Title of the figure.

    Raises:
      ValueError: The labels do not fit the matrix.
      OSError: The file cannot be written.
    """
    matrix = np.asarray(counts, float)
    percentages = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    return plot_matrices(
        percentages, rows=labels, columns=labels, xlabel="predicted class", ylabel="true class", title=title,
        colorbar_label="% of the true class", limits=(0.0, 100.0), path=path,
    )  # fmt: skip
