"""Figures of translation scores against the length of the sentence."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish, finish_lines


def plot_scores_by_length(
    curves: Mapping[str, Sequence[float]],
    path: str | pathlib.Path | None = None,
    *,
    bins: Sequence[str],
    counts: Sequence[int],
    score: str,
    title: str = "",
) -> Figure:
    """Draw a score against the length of the source, with a line per model.

    Args:
      curves: Scores in the bins, for each model's name.
      path: File to write; its extension selects the format.
      bins: Names of the bins, short sentences first.
      counts: Number of sentences in each bin.
      score: Name of the score.
      title: Title of the figure.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, scores), marker in zip(curves.items(), itertools.cycle("osD^vPX*"), strict=False):
        axes.plot(range(len(bins)), scores, marker=marker, markersize=4, linewidth=1.2, label=name)
    labels = [f"{name}\nn = {count:,}" for name, count in zip(bins, counts, strict=True)]
    axes.set_xticks(range(len(bins)), labels, fontsize=8)
    finish_lines(axes, xlabel="length of the source (words)", ylabel=score, title=title)
    return finish(figure, path)
