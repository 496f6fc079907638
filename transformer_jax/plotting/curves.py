"""Training curves."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
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


def plot_runs(
    runs: Mapping[str, Sequence[dict[str, Any]]],
    path: str | pathlib.Path | None = None,
    *,
    values: Mapping[str, str] | None = None,
    title: str = "",
) -> Figure:
    """Curves of several runs, a panel for each kind of value; losses on a logarithmic axis.

    Args:
      runs: for each run's name, the lines of its `metrics.jsonl`.
      path: picture to write too; the ending chooses the format.
      values: the names in those lines and how their axes are labelled; None: training and validation loss.
      title: shown above.

    Raises:
      ValueError: no run has one of the values.
    """
    values = values or {
        "loss": "training loss (nats per token)",
        "valid_loss": "validation loss (nats per token)",
    }
    figure = Figure(figsize=(5 * len(values), 3.8), layout="constrained")
    for axes, (value, label) in zip(
        figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True
    ):
        curves = {
            name: [(row["step"], row[value]) for row in rows if value in row] for name, rows in runs.items()
        }
        if not any(curves.values()):
            raise ValueError(f"no run has {value!r}; the first has {', '.join(_values(runs))}")
        for name, points in curves.items():
            if points:
                marker = "o" if len(points) < 30 else ""
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=1, label=name)
        axes.set(xlabel="step", ylabel=label)
        if "loss" in value:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _values(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    rows = next(iter(runs.values()), [])
    return sorted({name for row in rows for name in row} - {"step"})
