"""Cosine similarity of vectors, such as positions and embeddings."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.matrix import plot_matrices


def cosine_similarity(vectors: np.ndarray) -> np.ndarray:
    """Compute the cosines (T, T) of the angles between vectors (T, D); the cosine of a zero vector is 0."""
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit_vectors = vectors / np.where(norms == 0.0, 1.0, norms)
    return unit_vectors @ unit_vectors.T


def plot_similarity(
    vectors: np.ndarray,
    labels: Sequence[str] | None = None,
    path: str | pathlib.Path | None = None,
    *,
    axis_label: str = "position",
    title: str = "",
) -> Figure:
    """Draw the cosine of every pair of vectors.

    Args:
      vectors: Vectors (T, D).
      labels: Labels of the T vectors; None means numbers.
      path: File to write; its extension selects the format.
      axis_label: Label of the axes, such as "token".
      title: Title of the figure.

    Raises:
      ValueError: The labels do not fit, or the format of the file is unknown.
      OSError: The file cannot be written.
    """
    return plot_matrices(
        cosine_similarity(vectors),
        rows=labels,
        columns=labels,
        xlabel=axis_label,
        ylabel=axis_label,
        title=title,
        colorbar_label="cosine",
        limits=(-1.0, 1.0),
        colormap="RdBu",
        path=path,
    )
