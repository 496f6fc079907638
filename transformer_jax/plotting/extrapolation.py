"""How models hold up on texts longer than those they were trained on."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure


def plot_extrapolation(
    curves: Mapping[str, Mapping[int, float]],
    path: str | pathlib.Path | None = None,
    *,
    trained: int,
    title: str = "",
) -> Figure:
    """Loss against the length of the text, a line for each model.

    Args:
      curves: for each model's name, the loss in nats a token at each length in tokens.
      path: picture to write too; the ending chooses the format.
      trained: the length that all were trained on, marked.
      title: shown above.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    markers = "osD^vPX*"
    for number, (name, losses) in enumerate(curves.items()):
        lengths = sorted(losses)
        marker = markers[number % len(markers)]
        axes.plot(lengths, [losses[n] for n in lengths], marker=marker, markersize=4, linewidth=1, label=name)
    axes.axvline(trained, color="grey", linestyle=":", linewidth=1)
    axes.annotate("training length", (trained, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
                  textcoords="offset points", color="grey", fontsize=8)  # fmt: skip
    axes.set_xscale("log", base=2)
    lengths = sorted({n for losses in curves.values() for n in losses})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set(xlabel="length of the text (tokens)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
