"""How translations hold up as sentences grow longer."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def plot_scores_by_length(
    curves: Mapping[str, Sequence[float]],
    path: str | pathlib.Path | None = None,
    *,
    bins: Sequence[str],
    counts: Sequence[int],
    score: str,
    title: str = "",
) -> Figure:
    """A score against the length of the source, a line for each model.

    Args:
      curves: for each model's name, its score in each bin.
      path: picture to write too; the ending chooses the format.
      bins: names of the bins, short sentences first.
      counts: number of sentences in each bin.
      score: what the score is called.
      title: shown above.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    markers = "osD^vPX*"
    for number, (name, scores) in enumerate(curves.items()):
        axes.plot(range(len(bins)), scores, marker=markers[number % len(markers)], markersize=4, linewidth=1.2,
                  label=name)  # fmt: skip
    labels = [f"{name}\nn = {count:,}" for name, count in zip(bins, counts, strict=True)]
    axes.set_xticks(range(len(bins)), labels, fontsize=8)
    axes.set(xlabel="length of the source (words)", ylabel=score)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
