"""Figures of the loss on texts longer than those of the training."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish, finish_lines


def plot_extrapolation(
    curves: Mapping[str, Mapping[int, float]],
    path: str | pathlib.Path | None = None,
    *,
    training_length: int,
    title: str = "",
) -> Figure:
    """Draw the loss against the length of the text, with a line per model.

    Args:
      curves: Loss in nats per token by length in tokens, for each model's name.
      path: File to write; its extension selects the format.
      training_length: Training length of all models, which is marked.
      title: Title of the figure.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), marker in zip(curves.items(), itertools.cycle("osD^vPX*"), strict=False):
        lengths = sorted(losses)
        axes.plot(lengths, [losses[n] for n in lengths], marker=marker, markersize=4, linewidth=1, label=name)
    axes.axvline(training_length, color="gray", linestyle=":", linewidth=1)
    axes.annotate("training length", (training_length, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
                  textcoords="offset points", color="gray", fontsize=8)  # fmt: skip
    axes.set_xscale("log", base=2)
    lengths = sorted({n for losses in curves.values() for n in losses})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    finish_lines(axes, xlabel="length of the text (tokens)", ylabel="loss (nats per token)", title=title)
    return finish(figure, path)
