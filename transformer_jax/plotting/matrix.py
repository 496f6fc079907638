"""Figures of matrices in panels with a common color scale."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.labels import text_style, token_label

# Of more labels on an axis, only some are shown, to keep them readable.
_MAX_LABELS = 64
_BOOLEAN_COLORS = ListedColormap(["#e8e8e8", "#31688e"])


def plot_matrices(
    matrices: Mapping[str, np.ndarray] | np.ndarray,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    xlabel: str,
    ylabel: str,
    title: str = "",
    colorbar_label: str,
    limits: tuple[float, float] | None = None,
    colormap: str = "viridis",
    panels_per_row: int = 4,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draw matrices side by side.

    Args:
      matrices: Arrays (T, S) by title of the panel, or a single array; boolean arrays, such as masks, are drawn
        in two colors.
      rows: Labels of the T rows; None means numbers.
      columns: Labels of the S columns; None means numbers.
      xlabel: Label of the horizontal axis.
      ylabel: Label of the vertical axis.
      title: Title of the figure.
      colorbar_label: Label of the color scale.
      limits: Limits of the color scale; None means the minimum and the maximum of all values.
      colormap: Name of matplotlib's color map for numbers.
      panels_per_row: Maximum number of panels in a row.
      path: File to write; its extension selects the format.

    Raises:
      ValueError: There is no matrix, the shapes differ, or the labels do not fit.
      OSError: The file cannot be written.
    """
    by_title = matrices if isinstance(matrices, Mapping) else {"": matrices}
    panels = {name: np.asarray(matrix) for name, matrix in by_title.items()}
    shapes = {panel.shape for panel in panels.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"panels need matrices of one shape, got {sorted(shapes)}")
    T, S = shapes.pop()
    for labels, size, axis in ((rows, T, "rows"), (columns, S, "columns")):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{len(labels)} labels for {size} {axis}")
    boolean = all(panel.dtype == bool for panel in panels.values())
    lowest, highest = limits or (
        min(float(np.nanmin(panel)) for panel in panels.values()),
        max(float(np.nanmax(panel)) for panel in panels.values()),
    )
    if boolean:
        lowest, highest = -0.5, 1.5
    across = min(panels_per_row, len(panels))
    down = -(-len(panels) // across)
    # Each label needs a line of text; cells without labels may be smaller.
    width, height = (
        np.clip(0.06 * size, 2.4, 6.0) if labels is None else np.clip(0.24 * size, 1.8, 6.0)
        for labels, size in ((columns, S), (rows, T))
    )
    # Labels of columns are vertical and need more space than numbers.
    bottom = 0.9 if columns is not None else 0.3
    left = 0.9 if rows is not None else 0.4
    figure = Figure(
        figsize=(across * width + left + 1.4, down * (height + 0.3 + bottom) + 0.6), layout="constrained"
    )
    grid = figure.subplots(down, across, squeeze=False)
    image: AxesImage | None = None
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(
            panel.astype(float) if boolean else panel,
            vmin=lowest,
            vmax=highest,
            cmap=_BOOLEAN_COLORS if boolean else colormap,
            aspect="auto",
            interpolation="none",
        )
        if name:
            axes.set_title(name, fontsize=9, parse_math=False)
    for number in range(len(panels)):
        axes = grid.flat[number]
        label_axes(axes, rows, columns)
        axes.tick_params(labelleft=number % across == 0, labelbottom=number + across >= len(panels))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=grid, shrink=0.8, label=colorbar_label)
    if boolean:
        bar.set_ticks([0.0, 1.0], labels=["no", "yes"])
    if title:
        figure.suptitle(title, **text_style([title], 10))
    return finish(figure, path)


def label_axes(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    """Label the rows and the columns of a matrix with tokens.

    Args:
      axes: Axes of the panel.
      rows: Labels of the rows, of which at most 64 are shown; None means integers.
      columns: Labels of the columns, of which at most 64 are shown; None means integers.
    """

    def select(labels: Sequence[str]) -> tuple[range, list[str], dict[str, Any]]:
        positions = range(0, len(labels), -(-len(labels) // _MAX_LABELS))
        texts = [token_label(labels[position]) for position in positions]
        return positions, texts, text_style(texts)

    axes.tick_params(labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if columns is not None:
        positions, texts, style = select(columns)
        axes.set_xticks(positions, texts, rotation=90, **style)
    if rows is not None:
        positions, texts, style = select(rows)
        axes.set_yticks(positions, texts, **style)
