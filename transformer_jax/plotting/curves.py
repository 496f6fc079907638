"""Figures of training curves."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish


def plot_losses(
    rows: Sequence[dict[str, Any]], path: str | pathlib.Path | None = None, *, title: str = ""
) -> Figure:
    """Draw training and validation loss against the step.

    Args:
      rows: Lines of the run's `metrics.jsonl`.
      path: File to write; its extension selects the format.
      title: Title of the figure.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    smoothed = any(row["nll"] != row["loss"] for row in rows if "nll" in row and "loss" in row)
    for name, label, style in (
        ("loss", "training, smoothed labels" if smoothed else "training", "-"),
        ("valid_loss", "validation", "o-"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.set_yscale("log")
        axes.legend()
    if title:
        axes.set_title(title, fontsize=10)
    return finish(figure, path)


def plot_runs(
    runs: Mapping[str, Sequence[dict[str, Any]]],
    path: str | pathlib.Path | None = None,
    *,
    values: Mapping[str, str] | None = None,
    title: str = "",
) -> Figure:
    """Draw curves of several runs, with a panel per metric; losses have a logarithmic axis.

    Args:
      runs: Lines of `metrics.jsonl` by name of the run.
      path: File to write; its extension selects the format.
      values: Axis label by name of the metric; None means training and validation loss.
      title: Title of the figure.

    Raises:
      ValueError: No run has one of the metrics.
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
            rows = next(iter(runs.values()), [])
            known = sorted({name for row in rows for name in row} - {"step"})
            raise ValueError(f"no run has {value!r}; the first has {', '.join(known)}")
        for name, points in curves.items():
            if points:
                marker = "o" if len(points) < 30 else ""
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=1, label=name)
        axes.set(xlabel="step", ylabel=label)
        if "loss" in value:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return finish(figure, path, title=title)
