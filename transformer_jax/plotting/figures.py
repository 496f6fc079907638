"""The last steps that the figures share."""

from __future__ import annotations

import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def finish_lines(axes: Axes, *, xlabel: str, ylabel: str, title: str) -> None:
    """Add labels, a grid, a legend and a title to axes with labeled lines.

    Args:
      axes: Axes of the figure.
      xlabel: Label of the horizontal axis.
      ylabel: Label of the vertical axis.
      title: Title; an empty one is omitted.
    """
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)


def finish(figure: Figure, path: str | pathlib.Path | None, *, title: str = "", dpi: int = 120) -> Figure:
    """Add a title, write the figure if there is a path, and return it.

    Args:
      figure: The figure.
      path: File to write; its extension selects the format. None writes no file.
      title: Title of the figure; an empty one is omitted.
      dpi: Resolution of the file in dots per inch.
    """
    if title:
        figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=dpi)
    return figure
