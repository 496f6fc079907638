"""Figures of the attention over a long document."""

from __future__ import annotations

import itertools
import pathlib
import textwrap
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.labels import text_style

# Columns of the map; a longer document has several tokens in a column.
_COLUMNS = 160
_PASSAGES, _WIDTH = 5, 110


def plot_document(attention: Any, path: str | pathlib.Path | None = None, *, title: str = "") -> Figure:
    """Draw where the first token of a document attends: a row for each layer, and the strongest passages.

    A color is the ratio to equal attention to all tokens, averaged over heads and over the tokens of a column.

    Args:
      attention: `interpretability.documents.DocumentAttention`.
      path: File to write; its extension selects the format.
      title: Title of the figure.
    """
    layers, _, length = attention.weights.shape
    columns = min(_COLUMNS, length)
    edges = np.linspace(0, length, columns + 1).round().astype(int)
    by_layer = attention.weights.mean(axis=1) * length
    ratios = np.stack([by_layer[:, a:b].mean(axis=1) for a, b in itertools.pairwise(edges)], axis=1)
    passages = attention.passages(_PASSAGES)
    figure = Figure(figsize=(9, 1.6 + 0.22 * layers + 0.24 * len(passages)), layout="constrained")
    axes, text_axes = figure.subplots(2, 1, height_ratios=[1.0 + 0.22 * layers, 0.2 + 0.24 * len(passages)])
    image = axes.imshow(
        np.log2(np.maximum(ratios, 2.0**-4)), aspect="auto", cmap="RdBu_r", vmin=-4, vmax=4,
        extent=(0, length, layers + 0.5, 0.5), interpolation="none",
    )  # fmt: skip
    axes.set(xlabel="token", ylabel="layer", yticks=range(1, layers + 1))
    bar = figure.colorbar(image, ax=axes, ticks=[-4, 0, 4], pad=0.01)
    bar.ax.set_yticklabels(["1/16", "equal", "16 x"])
    text_axes.set_axis_off()
    lines = [
        textwrap.shorten(f"{100 * share:4.1f} %  token {start:,}:  {text}", _WIDTH, placeholder=" …")
        for share, start, text in passages
    ]
    text_axes.text(0, 1, "\n".join(lines), va="top", **text_style(lines, size=8))
    if title:
        title = textwrap.shorten(title, _WIDTH - 20, placeholder=" …")
        axes.set_title(title, **text_style([title], size=10))
    return finish(figure, path)
