"""Confusion matrices as pictures."""

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
    """Draws which classes are taken for which.

    Args:
      counts: (C, C), row of the true class and column of the one that was found.
      labels: names of the classes.
      path: picture to write too.
      title: shown above.

    Raises:
      ValueError: labels that do not fit.
      OSError: the picture cannot be written.
    """
    matrix = np.asarray(counts, float)
    shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    return plot_matrices(
        shares, rows=labels, columns=labels, xlabel="class found", ylabel="true class", title=title,
        colours="% of the true class", limits=(0.0, 100.0), path=path,
    )  # fmt: skip
