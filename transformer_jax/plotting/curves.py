"""Training curves."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure


def plot_losses(
    rows: Sequence[dict[str, Any]], path: str | pathlib.Path | None = None, *, title: str = ""
) -> Figure:
    """Training and validation loss against the step, from the lines of `metrics.jsonl`.

    Args:
      rows: the lines.
      path: picture to write too; the ending chooses the format.
      title: shown above.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    smoothed = any(row["nll"] != row["loss"] for row in rows if "nll" in row and "loss" in row)
    for name, label, style in (
        ("loss", "training, smoothed labels" if smoothed else "training", "-"),
        ("valid_loss", "validation", "o-"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            drawn = True
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if drawn:
        axes.set_yscale("log")
        axes.legend()
    if title:
        axes.set_title(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
