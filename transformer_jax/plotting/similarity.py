"""Which vectors are alike: positions, embeddings, the stream at different tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.matrix import plot_matrices


def cosine_similarity(vectors: np.ndarray) -> np.ndarray:
    """(T, D) -> (T, T) cosines of the angles between them; of a zero vector with any, 0."""
    vectors = np.asarray(vectors, np.float64)
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = vectors / np.where(length == 0.0, 1.0, length)
    return unit @ unit.T


def plot_similarity(
    vectors: np.ndarray,
    labels: Sequence[str] | None = None,
    path: str | pathlib.Path | None = None,
    *,
    what: str = "position",
    title: str = "",
) -> Figure:
    """Draws the cosine of every two vectors.

    Args:
      vectors: (T, D).
      labels: of the T; None: numbers.
      path: picture to write too; the ending chooses the format.
      what: what the vectors are of.
      title: shown above.

    Raises:
      ValueError: labels that do not fit, or an unknown kind of picture.
      OSError: the picture cannot be written.
    """
    return plot_matrices(
        cosine_similarity(vectors),
        rows=labels,
        columns=labels,
        xlabel=what,
        ylabel=what,
        title=title,
        colours="cosine",
        limits=(-1.0, 1.0),
        colormap="RdBu",
        path=path,
    )
